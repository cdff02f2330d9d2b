//! Reads `/etc/resolv.conf` and `/etc/hosts` line by line. A faulty item is left out and becomes a [`Problem`]; the rest of its
//! line applies. The DNS library refuses the whole file for one faulty search domain, or for one byte that is not UTF-8.
//!
//! `/etc/nsswitch.conf` and `/etc/host.conf` are not read: the hosts file comes before DNS, and all addresses of a name in
//! the hosts file count.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str;
use std::time::Duration;

use super::search::dns_name;
use super::zones::Zone;

/// Bytes that are read of each file.
const RESOLV_CONF_MAX: usize = 64 * 1024;
const HOSTS_MAX: usize = 4 * 1024 * 1024;
/// Name servers that are asked; glibc asks 3.
const NAME_SERVERS_MAX: usize = 8;
/// Search domains that are tried; Kubernetes writes up to 32.
const SEARCH_MAX: usize = 32;
/// Addresses that a hosts file gives to one name.
const ADDRESSES_MAX: usize = 64;
/// Problems of one file that are logged; further ones are counted.
const PROBLEMS_MAX: usize = 8;
/// Bytes of an item that are logged; the longest name has 253.
const ITEM_MAX: usize = 256;
/// Greatest `options ndots:` and `attempts:`; glibc's.
const NDOTS_MAX: u32 = 15;
const ATTEMPTS_MAX: u32 = 5;

/// Contents of a resolv.conf.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ResolvConf {
    /// In the order of the file, at most [`NAME_SERVERS_MAX`].
    pub(super) name_servers: Vec<(IpAddr, Option<Zone>)>,
    /// Without final dots. `None`: the file has no such line, and the domain of this host's name applies.
    search: Option<Vec<String>>,
    pub(super) ndots: usize,
    /// Wait for one answer, as written.
    pub(super) timeout: Duration,
    /// Questions to one name server, at least one.
    pub(super) attempts: usize,
    pub(super) edns0: bool,
    /// Each lookup begins at the next name server.
    pub(super) rotate: bool,
    /// TCP only.
    pub(super) use_vc: bool,
}

impl Default for ResolvConf {
    /// The defaults of resolv.conf(5), without a name server.
    fn default() -> Self {
        Self {
            name_servers: Vec::new(),
            search: None,
            ndots: 1,
            timeout: Duration::from_secs(5),
            attempts: 2,
            edns0: false,
            rotate: false,
            use_vc: false,
        }
    }
}

/// Names of a hosts file in lower case, without final dots, with their addresses.
pub(super) type HostsFile = HashMap<String, Vec<IpAddr>>;

/// An item of a file that is ignored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Problem {
    /// From 1; 0 for the whole file.
    line: usize,
    /// The word at fault; what is not printable ASCII is escaped.
    item: String,
    why: Cow<'static, str>,
}

/// The problems of one file; the first [`PROBLEMS_MAX`] are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Problems {
    file: PathBuf,
    list: Vec<Problem>,
    /// Problems that are not in the list.
    more: usize,
}

impl Problems {
    pub(super) fn of(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            list: Vec::new(),
            more: 0,
        }
    }

    /// `line` is 0 for the whole file.
    pub(super) fn add(&mut self, line: usize, item: &[u8], why: impl Into<Cow<'static, str>>) {
        let why = why.into();
        if self.list.len() < PROBLEMS_MAX {
            let shown = item.get(..ITEM_MAX).unwrap_or(item);
            let item = shown.escape_ascii().to_string();
            self.list.push(Problem { line, item, why });
        } else {
            self.more += 1;
        }
    }

    /// Logs each problem that is not in `before`.
    pub(super) fn warn(&self, before: Option<&Self>) {
        let file = self.file.display();
        let is_known = |problem: &&Problem| before.is_some_and(|b| b.list.contains(problem));
        for problem in self.list.iter().filter(|problem| !is_known(problem)) {
            let Problem { line, item, why } = problem;
            tracing::warn!(%file, line, item, %why, "item of a resolver file is ignored");
        }
        if self.more > 0 && before.is_none_or(|before| before.more != self.more) {
            tracing::warn!(%file, count = self.more, "more items of a resolver file are ignored");
        }
    }
}

impl ResolvConf {
    /// Reads a file. Blocks.
    ///
    /// # Errors
    /// The file cannot be read. A file without a name server is no error.
    pub(super) fn read(path: &Path, problems: &mut Problems) -> io::Result<Self> {
        let text = read(path, RESOLV_CONF_MAX, problems)?;
        Ok(Self::parse(&text, problems))
    }

    fn parse(text: &[u8], problems: &mut Problems) -> Self {
        let mut conf = Self::default();
        for (line, mut words) in lines(text, b"#;") {
            let keyword = words.next().unwrap_or_default();
            let words: Vec<&[u8]> = words.collect();
            let mut wrong = |item: &[u8], why| problems.add(line, item, why);
            match (keyword, words.as_slice()) {
                (b"nameserver" | b"domain", []) => wrong(keyword, "nothing follows the keyword"),
                (b"nameserver", [address, more @ ..]) => {
                    match name_server(address) {
                        Ok(_) if conf.name_servers.len() >= NAME_SERVERS_MAX => {
                            wrong(address, "there are more than 8 name servers");
                        }
                        Ok(name_server) => conf.name_servers.push(name_server),
                        Err(why) => wrong(address, why),
                    }
                    more.iter()
                        .for_each(|word| wrong(word, "a nameserver line has one address"));
                }
                (b"domain", [domain, more @ ..]) => {
                    conf.set_search(&[domain], &mut wrong);
                    more.iter()
                        .for_each(|word| wrong(word, "a domain line has one domain"));
                }
                (b"search", domains) => conf.set_search(domains, &mut wrong),
                (b"options", options) => {
                    for option in options {
                        conf.set_option(option)
                            .unwrap_or_else(|why| wrong(option, why));
                    }
                }
                // Keywords of other systems and resolvers.
                (b"sortlist" | b"lookup" | b"family" | b"port", _) => (),
                _ => wrong(keyword, "unknown keyword"),
            }
        }
        conf
    }

    /// The last line with a valid domain applies. An empty one does too: it has no search domains.
    fn set_search(&mut self, domains: &[&[u8]], wrong: &mut impl FnMut(&[u8], &'static str)) {
        let is_domain = |name: &str| dns_name(name).is_some();
        let mut search = Vec::new();
        let mut is_wrong = false;
        for domain in domains {
            match str::from_utf8(domain) {
                // The root, as of a host without search domains.
                Ok(".") => (),
                Ok(name) if is_domain(name) && search.len() < SEARCH_MAX => {
                    search.push(without_final_dot(name).to_owned());
                }
                Ok(name) if is_domain(name) => {
                    wrong(domain, "there are more than 32 search domains");
                }
                Ok(_) | Err(_) => {
                    is_wrong = true;
                    wrong(domain, "not a domain name");
                }
            }
        }
        if !(search.is_empty() && is_wrong) {
            self.search = Some(search);
        }
    }

    fn set_option(&mut self, option: &[u8]) -> Result<(), &'static str> {
        let text = str::from_utf8(option).map_err(|_not_text| "unknown option")?;
        let (name, value) = text
            .split_once(':')
            .map_or((text, None), |(name, value)| (name, Some(value)));
        let number = || {
            let value = value.ok_or("the option has no number")?;
            value
                .parse::<u32>()
                .map_err(|_no_number| "the value of the option is not a number")
        };
        match name {
            "ndots" => self.ndots = number()?.min(NDOTS_MAX) as usize,
            "timeout" => self.timeout = Duration::from_secs(number()?.into()),
            "attempts" => self.attempts = number()?.clamp(1, ATTEMPTS_MAX) as usize,
            "edns0" => self.edns0 = true,
            "rotate" => self.rotate = true,
            "use-vc" | "usevc" | "tcp" => self.use_vc = true,
            // Options of glibc and of other systems, without an effect here.
            "debug"
            | "inet6"
            | "insecure1"
            | "insecure2"
            | "ip6-bytestring"
            | "ip6-dotint"
            | "no-aaaa"
            | "no-check-names"
            | "no-ip6-dotint"
            | "no-reload"
            | "no-tld-query"
            | "single-request"
            | "single-request-reopen"
            | "strict-error"
            | "trust-ad" => (),
            _ => return Err("unknown option"),
        }
        Ok(())
    }

    /// The search domains; by default the domain of this host's name.
    pub(super) fn search(&self, host: &str) -> Vec<String> {
        self.search.clone().unwrap_or_else(|| {
            let domain = host.split_once('.').map(|(_host, domain)| domain);
            let domain = domain.filter(|domain| dns_name(domain).is_some());
            domain
                .map(|domain| without_final_dot(domain).to_owned())
                .into_iter()
                .collect()
        })
    }
}

/// An address and its zone, if it has one: the name or the index of an interface.
fn name_server(word: &[u8]) -> Result<(IpAddr, Option<Zone>), &'static str> {
    let not_an_address = "not an IP address";
    let word = str::from_utf8(word).map_err(|_not_text| not_an_address)?;
    match word.split_once('%') {
        None => match word.parse() {
            Ok(address) => Ok((address, None)),
            Err(_) => Err(not_an_address),
        },
        Some((_, "")) => Err("the zone is empty"),
        Some((address, zone)) => match address.parse::<Ipv6Addr>() {
            Ok(address) => Ok((address.into(), Some(Zone::from(zone)))),
            Err(_) if address.parse::<Ipv4Addr>().is_ok() => Err("an IPv4 address has no zone"),
            Err(_) => Err(not_an_address),
        },
    }
}

/// Reads a hosts file. Blocks.
///
/// # Errors
/// The file cannot be read.
pub(super) fn read_hosts(path: &Path, problems: &mut Problems) -> io::Result<HostsFile> {
    let text = read(path, HOSTS_MAX, problems)?;
    Ok(parse_hosts(&text, problems))
}

fn parse_hosts(text: &[u8], problems: &mut Problems) -> HostsFile {
    let mut hosts = HostsFile::new();
    for (line, mut words) in lines(text, b"#") {
        let word = words.next().unwrap_or_default();
        let address = str::from_utf8(word).ok().and_then(|word| word.parse().ok());
        let Some(address): Option<IpAddr> = address else {
            let why = if word.contains(&b'%') {
                "an address with a zone is not supported"
            } else {
                "not an IP address"
            };
            problems.add(line, word, why);
            continue;
        };
        let mut names = words.peekable();
        if names.peek().is_none() {
            problems.add(line, word, "no name follows the address");
        }
        for name in names {
            let Ok(text) = str::from_utf8(name) else {
                problems.add(line, name, "the name is not UTF-8");
                continue;
            };
            let addresses = hosts.entry(host_key(text)).or_default();
            if addresses.len() < ADDRESSES_MAX && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    hosts
}

/// A name as the key of a [`HostsFile`].
pub(super) fn host_key(name: &str) -> String {
    without_final_dot(name).to_ascii_lowercase()
}

fn without_final_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

/// The words of each line that has any, and its number from 1. A comment begins with one of `comment`.
fn lines<'a>(
    text: &'a [u8],
    comment: &'static [u8],
) -> impl Iterator<Item = (usize, impl Iterator<Item = &'a [u8]>)> {
    const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let lines = text.split(|byte| *byte == b'\n').zip(1..);
    lines.filter_map(move |(line, number)| {
        let said = line.split(|byte| comment.contains(byte)).next()?;
        let words = said.split(u8::is_ascii_whitespace);
        let mut words = words.filter(|word| !word.is_empty()).peekable();
        words.peek().is_some().then_some((number, words))
    })
}

/// The whole lines within the first `bytes_max` of a file.
fn read(path: &Path, bytes_max: usize, problems: &mut Problems) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let limit = bytes_max as u64 + 1;
    adit_host::files::open(path)?
        .take(limit)
        .read_to_end(&mut text)?;
    if text.len() > bytes_max {
        let last = text.iter().rposition(|byte| *byte == b'\n');
        text.truncate(last.map_or(0, |at| at + 1));
        let first_ignored = text.iter().filter(|byte| **byte == b'\n').count() + 1;
        problems.add(
            first_ignored,
            b"",
            "the file is too large: this line and those below are ignored",
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
