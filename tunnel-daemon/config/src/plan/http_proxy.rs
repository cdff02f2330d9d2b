//! The URL of an HTTP proxy.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::address::ServerAddress;

/// An HTTP proxy. `Debug` hides user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpProxy {
    /// TLS to the proxy.
    pub is_tls: bool,
    /// Name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The URL names the port.
    pub names_port: bool,
    /// User and password.
    pub user: Option<(String, String)>,
}

impl HttpProxy {
    /// Host and port, without user and password.
    #[must_use]
    pub fn authority(&self) -> String {
        let (host, port) = (self.host.clone(), self.port);
        ServerAddress::Host { host, port }.to_string()
    }

    /// The value of `Proxy-Authorization` for it (RFC 7617).
    #[must_use]
    pub fn authorization(&self) -> Option<String> {
        let (name, password) = self.user.as_ref()?;
        let both = STANDARD.encode(format!("{name}:{password}"));
        Some(format!("Basic {both}"))
    }

    /// Reads a URL. Errors do not repeat it, since it may contain a password.
    ///
    /// # Errors
    /// What is wrong, and what to write.
    pub fn parse(url: &str) -> Result<Self, &'static str> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        let is_tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err("has no usable scheme: write http://HOST:PORT or https://HOST:PORT"),
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        let behind = rest.get(authority.len()..).unwrap_or_default();
        if behind.contains('@') {
            return Err("has a user or password with an unescaped / ? or #: write %2F, %3F, %23");
        }
        let (user, address) = match authority.rsplit_once('@') {
            Some((user, address)) => (Some(user), address),
            None => (None, authority),
        };
        let (host, port) = match address.strip_prefix('[') {
            Some(bracketed) => bracketed
                .split_once(']')
                .map(|(host, rest)| (host, rest.strip_prefix(':')))
                .ok_or("has an address without a closing bracket")?,
            None => match address.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (address, None),
            },
        };
        if host.is_empty() {
            return Err("names no host: write http://HOST:PORT");
        }
        let port = port.filter(|port| !port.is_empty());
        let number = |text: &str| {
            let is_number = text.bytes().all(|octet| octet.is_ascii_digit());
            text.parse().ok().filter(|port| is_number && *port != 0)
        };
        let number = match port {
            Some(text) => Some(number(text).ok_or("has a bad port: write 1 to 65535")?),
            None => None,
        };
        let user = user
            .map(|user| {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                Ok::<_, &'static str>((decoded(name)?, decoded(password)?))
            })
            .transpose()?;
        Ok(Self {
            is_tls,
            host: host.to_owned(),
            port: number.unwrap_or(if is_tls { 443 } else { 80 }),
            names_port: number.is_some(),
            user,
        })
    }
}

/// Decodes percent escapes.
fn decoded(text: &str) -> Result<String, &'static str> {
    const BAD: &str =
        "has a user or password with a bad percent escape: write %25 for a percent sign";
    let mut octets = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(octet) = rest.next() {
        let digit = |digit: Option<u8>| char::from(digit?).to_digit(16);
        octets.push(match octet {
            b'%' => {
                let (high, low) = (digit(rest.next()), digit(rest.next()));
                let both = high.zip(low).ok_or(BAD)?;
                u8::try_from(both.0 * 16 + both.1).map_err(|_large| BAD)?
            }
            octet => octet,
        });
    }
    String::from_utf8(octets).map_err(|_bad| BAD)
}

impl fmt::Debug for HttpProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProxy")
            .field("is_tls", &self.is_tls)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user.as_ref().map(|_hidden| "***"))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_url_has_an_escaped_user_and_a_default_port() {
        let proxy = HttpProxy::parse("https://us%40er:p%3Ass%25@proxy.example").unwrap();
        let user = ("us@er".to_owned(), "p:ss%".to_owned());
        assert_eq!(proxy.user, Some(user));
        assert!(proxy.is_tls && !proxy.names_port);
        assert_eq!((proxy.host.as_str(), proxy.port), ("proxy.example", 443));
        assert!(!format!("{proxy:?}").contains("us@er"));
        for (url, host, port) in [
            ("proxy:3128", "proxy", 3128),
            ("http://[fd00::1]:3128/", "fd00::1", 3128),
            ("http://10.0.0.1", "10.0.0.1", 80),
        ] {
            let proxy = HttpProxy::parse(url).unwrap();
            assert_eq!(
                (proxy.host.as_str(), proxy.port, proxy.user),
                (host, port, None),
                "{url}"
            );
        }
        for url in [
            "socks5://a:1",
            "http://",
            "http://a:x",
            "http://u%zz@a:1",
            "http://[fd00::1:1",
            "http://a:0",
            "http://a:+80",
            "http://me:s3cret/x@proxy.example",
            "http://us:12/s3cret@proxy.example:3128",
            "http://me?s3cret@proxy.example",
        ] {
            let why = HttpProxy::parse(url).unwrap_err();
            assert!(
                !why.contains("s3cret") && why.contains("write") || why.contains("bracket"),
                "{url}: {why}"
            );
        }
    }
}
