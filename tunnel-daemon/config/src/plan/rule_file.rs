//! Parses redirect rules: one target of a flag, or a file of rules that may change at run time.

use std::net::IpAddr;
use std::str::FromStr;

use adit_core::destination::canonical_net;
use ipnet::IpNet;

use super::admin_socket::Program;
use super::node::CapturedService;
use super::transparent::RedirectTarget;
use crate::limits;

impl FromStr for RedirectTarget {
    type Err = String;

    /// `10.0.0.0/8`, `10.1.2.3:443`, `10.0.0.0/8:9090`, `fd00::/64`, `[fd00::/64]:443`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |what: &str| {
            format!(
                "{what} in {text:?}: write CIDR or ADDRESS, with :PORT or without, such as 10.0.0.0/8:9090 or [fd00::/64]:443"
            )
        };
        let (network, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (network, tail) = rest.split_once(']').ok_or_else(|| bad("no ]"))?;
                match tail {
                    "" => (network, None),
                    tail => (
                        network,
                        Some(tail.strip_prefix(':').ok_or_else(|| bad("no : behind ]"))?),
                    ),
                }
            }
            // Several colons: an IPv6 address without a port.
            None if text.matches(':').count() > 1 => (text, None),
            None => match text.split_once(':') {
                Some((network, port)) => (network, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            None => None,
            Some(port) => match port.parse() {
                Ok(0) | Err(_) => return Err(bad(&format!("{port:?} is no port from 1 to 65535"))),
                Ok(port) => Some(port),
            },
        };
        let parsed: Result<IpNet, _> = match network.parse::<IpAddr>() {
            Ok(address) => Ok(IpNet::from(address)),
            Err(_not_an_address) => network.parse(),
        };
        let parsed = parsed.map_err(|_neither| bad(&format!("{network:?} is no network")))?;
        let whole = parsed.trunc();
        if whole != parsed {
            return Err(bad(&format!(
                "bits are set behind the prefix of {network}, which is {whole}"
            )));
        }
        Ok(Self {
            network: canonical_net(whole),
            port,
        })
    }
}

/// Rules that a file adds to the flags of the same names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuleFile {
    /// `redirect TARGET`.
    pub targets: Vec<RedirectTarget>,
    /// `redirect-exclude TARGET`.
    pub excluded: Vec<RedirectTarget>,
    /// `redirect-apiserver SERVICE_IP:PORT=DEST_HOST:DEST_PORT`.
    pub services: Vec<CapturedService>,
}

impl RuleFile {
    /// Reads one rule per line: the name of a flag, a space, its value. Empty lines and text after `#` are ignored. A server
    /// has the rules `redirect` and `redirect-exclude`, an agent `redirect-apiserver`.
    ///
    /// # Errors
    /// The first invalid line, by number, with the expected form.
    pub fn parse(text: &str, of: Program) -> Result<Self, String> {
        if text.len() > limits::REDIRECT_FILE_BYTES_MAX {
            let max = limits::REDIRECT_FILE_BYTES_MAX;
            return Err(format!("{} bytes are too many: at most {max}", text.len()));
        }
        let mut file = Self::default();
        for (number, line) in text.lines().enumerate() {
            let rule = line.split('#').next().unwrap_or_default().trim();
            if rule.is_empty() {
                continue;
            }
            file.add(rule, of)
                .map_err(|why| format!("line {}: {why}", number + 1))?;
        }
        Ok(file)
    }

    fn add(&mut self, rule: &str, of: Program) -> Result<(), String> {
        let (name, value) = rule
            .split_once(char::is_whitespace)
            .map_or((rule, ""), |(name, value)| (name, value.trim()));
        match (name, of) {
            ("redirect", Program::Server) => self.targets.push(value.parse()?),
            ("redirect-exclude", Program::Server) => self.excluded.push(value.parse()?),
            ("redirect-apiserver", Program::Agent) => {
                let service = CapturedService::parse(value);
                self.services
                    .push(service.map_err(|error| error.to_string())?);
            }
            _ => {
                let names = match of {
                    Program::Server => "`redirect TARGET` or `redirect-exclude TARGET`",
                    Program::Agent | Program::Proxy => {
                        "`redirect-apiserver SERVICE_IP:PORT=DEST_HOST:DEST_PORT`"
                    }
                };
                return Err(format!("{name:?} is no rule: write {names}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<RedirectTarget, String> {
        text.parse()
    }

    #[test]
    fn networks_come_with_a_port_or_without() {
        for (text, network, port) in [
            ("10.0.0.0/8", "10.0.0.0/8", None),
            ("10.0.0.0/8:9090", "10.0.0.0/8", Some(9090)),
            ("10.1.2.3", "10.1.2.3/32", None),
            ("10.1.2.3:443", "10.1.2.3/32", Some(443)),
            ("fd00::/64", "fd00::/64", None),
            ("fd00::1", "fd00::1/128", None),
            ("[fd00::/64]:443", "fd00::/64", Some(443)),
            ("[fd00::1]", "fd00::1/128", None),
            ("0.0.0.0/0", "0.0.0.0/0", None),
            ("::ffff:10.1.2.3", "10.1.2.3/32", None),
            ("[::ffff:10.0.0.0/104]:443", "10.0.0.0/8", Some(443)),
            ("::ffff:0:0/96", "0.0.0.0/0", None),
            ("::/0", "::/0", None),
            ("::/96", "::/96", None),
        ] {
            let expected = RedirectTarget {
                network: network.parse().unwrap(),
                port,
            };
            assert_eq!(target(text), Ok(expected), "{text}");
            assert_eq!(target(&expected.to_string()), Ok(expected), "{expected}");
        }
    }

    #[test]
    fn an_invalid_network_is_refused_with_an_example() {
        for text in [
            "",
            "example.com",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "10.0.0.0/8:",
            "10.0.0.0/8:0",
            "[fd00::1",
            "[fd00::1]443",
            "10.0.0.0/8:70000",
        ] {
            let error = target(text).unwrap_err();
            assert!(error.contains("10.0.0.0/8:9090"), "{text}: {error}");
        }
    }

    #[test]
    fn a_rule_file_has_one_rule_per_line_named_like_its_flag() {
        let text = "# the cluster\n\nredirect 10.0.0.0/8\n  redirect-exclude\t10.0.0.10:53  # its resolver\n";
        let file = RuleFile::parse(text, Program::Server).unwrap();
        assert_eq!(file.targets, [target("10.0.0.0/8").unwrap()]);
        assert_eq!(file.excluded, [target("10.0.0.10:53").unwrap()]);
        let text = "redirect-apiserver 10.96.0.1:443=a:1";
        let file = RuleFile::parse(text, Program::Agent).unwrap();
        assert_eq!(file.services.len(), 1);
        let empty = RuleFile::parse("", Program::Agent);
        assert_eq!(empty, Ok(RuleFile::default()));
    }

    #[test]
    fn errors_in_a_rule_file_name_the_line_number() {
        use Program::{Agent, Server};
        for (text, of, said) in [
            ("\nredirect 10.0.0.1/8", Server, "line 2"),
            ("redirect", Server, "10.0.0.0/8:9090"),
            ("10.0.0.0/8", Server, "redirect-exclude TARGET"),
            ("redirect 10.0.0.0/8", Agent, "redirect-apiserver SERVICE"),
            ("redirect-apiserver 10.0.0.1:443", Agent, "no destination"),
        ] {
            let error = RuleFile::parse(text, of).unwrap_err();
            for part in ["line ", said] {
                assert!(error.contains(part), "{text}: {error}");
            }
        }
        let long = " ".repeat(limits::REDIRECT_FILE_BYTES_MAX + 1);
        assert!(RuleFile::parse(&long, Server).is_err());
    }
}
