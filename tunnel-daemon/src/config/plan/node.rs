//! Node to control plane: what an agent listens on for others, and what its server may dial for it.

use adit_core::target::{Host, Target};

use crate::config::address::BindAddress;
use crate::config::error::ConfigError;
use crate::config::limits;

/// A listener of an agent: each of its connections goes to one destination, which the server dials.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetListener {
    /// Where connections come in.
    pub bind: BindAddress,
    /// `host:port`, in the spelling that servers are asked with.
    pub destination: String,
}

impl TargetListener {
    /// Reads `LOCAL_PORT:DEST_HOST:DEST_PORT`; `bind` is the address that the local port belongs to.
    ///
    /// # Errors
    /// What is wrong with the text, and how to write it.
    pub fn parse(text: &str, bind: &str) -> Result<Self, ConfigError> {
        let bad = |why: &str| {
            ConfigError::new(format!(
                "--target {text:?}: {why}; write LOCAL_PORT:DEST_HOST:DEST_PORT, such as 6443:kubernetes.example:6443 or \
                 6443:[fd00::1]:6443"
            ))
        };
        let (port, destination) = text
            .split_once(':')
            .ok_or_else(|| bad("it has no destination"))?;
        let port: u16 = port
            .parse()
            .map_err(|_not_a_port| bad("the local port is no number from 0 to 65535"))?;
        let target = Target::parse(destination)
            .map_err(|flaw| bad(&format!("the destination cannot be read: {flaw}")))?;
        if target.port == 0 {
            return Err(bad("the destination has no port"));
        }
        let named = |name: &str| BindAddress::new(name, 0).is_ok_and(|_| !name.is_empty());
        if matches!(&target.host, Host::Name(name) if !named(name)) {
            return Err(bad("the destination has no host"));
        }
        let bind = BindAddress::new(bind, port)
            .map_err(|why| ConfigError::new(format!("--bind-address: {why}")))?;
        Ok(Self {
            bind,
            destination: target.to_string(),
        })
    }
}

/// What an agent's listeners need of the rest of its plan.
///
/// # Errors
/// Too many of them, or no lanes to carry their tunnels.
pub(super) fn check_targets(
    targets: &[TargetListener],
    lanes_max: u32,
    has_certificate: bool,
) -> Result<(), ConfigError> {
    if targets.is_empty() {
        return Ok(());
    }
    let (count, max) = (targets.len(), limits::NODE_LISTENERS_MAX);
    if count > max {
        return Err(ConfigError::new(format!(
            "{count} listeners of --target are too many: at most {max}"
        )));
    }
    if lanes_max == 0 {
        return Err(ConfigError::new(
            "--target needs lanes, and --lanes=0 allows none: drop one",
        ));
    }
    if !has_certificate {
        return Err(ConfigError::new(
            "--target needs lanes, which servers grant to client certificates only: give --agent-cert and --agent-key",
        ));
    }
    Ok(())
}

/// What a server dials for agents.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DestinationsPlan {
    /// `--allowed-destination` entries as typed, checked; empty: agents may open nothing.
    pub allowed: Vec<String>,
    /// Each connection begins with a header that names its agent.
    pub proxy_header: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_and_shown_in_one_spelling() {
        for (text, bind, listens, destination) in [
            (
                "6443:Kube.example:443",
                "127.0.0.1",
                "127.0.0.1:6443",
                "kube.example:443",
            ),
            ("0:[FD00::1]:6443", "[::1]", "[::1]:0", "[fd00::1]:6443"),
            ("1:10.0.0.1:2", "::1", "[::1]:1", "10.0.0.1:2"),
        ] {
            let listener = TargetListener::parse(text, bind).unwrap();
            assert_eq!(listener.bind.to_string(), listens);
            assert_eq!(listener.destination, destination);
        }
    }

    #[test]
    fn bad_targets_name_the_text_and_the_form() {
        for text in [
            "",
            "6443",
            "6443:",
            "6443:host",
            "6443:host:0",
            "6443:host:",
            "x:host:1",
            "65536:host:1",
            "6443::1",
            "6443:a b:1",
            "6443:fd00::1:1",
        ] {
            let error = TargetListener::parse(text, "127.0.0.1").unwrap_err();
            assert!(
                error.message().contains(&format!("{text:?}"))
                    && error.message().contains("LOCAL_PORT:DEST_HOST:DEST_PORT"),
                "{error}"
            );
        }
        let error = TargetListener::parse("1:a:1", "a b").unwrap_err();
        assert!(error.message().contains("--bind-address"), "{error}");
    }
}
