//! Agent identifiers: the hosts and networks an agent claims, encoded as a URL query.

use std::slice;

use crate::text::Excerpt;

/// Most identifiers of one agent. Far above real agents (a node has a handful); bounds the registry's work per agent.
pub const IDENTIFIERS_MAX: usize = 1024;
/// Longest identifier, bytes. DNS names have at most 253 bytes and networks about 40. Each identifier becomes a key of the
/// registry, which may outlive the agent.
pub const IDENTIFIER_LEN_MAX: usize = 255;

/// An agent's identifiers by kind; repeated values keep their order. Values are as received: the registry checks and
/// normalises them.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Identifiers {
    /// Addresses of the agent's node or network, for `destHost`.
    pub ipv4: Vec<String>,
    /// IPv6 addresses of the agent's node or network, without brackets, for `destHost`.
    pub ipv6: Vec<String>,
    /// Host names, for `destHost`.
    pub host: Vec<String>,
    /// Networks behind the agent, for `destCIDR`.
    pub cidr: Vec<String>,
    /// Whether the agent takes targets that no other agent claims, for `defaultRoute`.
    pub default_route: bool,
    /// The agent's zone: among equally matching agents a server prefers those in its own zone. Go peers do not send it.
    pub zone: Option<String>,
}

/// Why identifiers cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdentifiersError {
    /// `;` is not a separator; Go refuses it, too.
    #[error("invalid semicolon separator in query; separate identifiers with &")]
    Semicolon,
    /// `%` not followed by two hexadecimal digits.
    #[error("invalid URL escape \"{0}\"")]
    Escape(String),
    /// Only in an agent's own configuration: an unknown kind, including `uid`.
    #[error(
        "agent address is invalid: unknown address type: {0} (known: ipv4, ipv6, host, cidr, default-route, zone)"
    )]
    UnknownKind(String),
    /// More than [`IDENTIFIERS_MAX`].
    #[error("more than {IDENTIFIERS_MAX} identifiers")]
    TooMany,
    /// An identifier of more than [`IDENTIFIER_LEN_MAX`] bytes.
    #[error(
        "an identifier of kind {kind} has {bytes} bytes, more than {IDENTIFIER_LEN_MAX}; give the agent a shorter one"
    )]
    TooLong {
        /// Kind, as in the query.
        kind: &'static str,
        /// Its length.
        bytes: usize,
    },
}

impl Identifiers {
    /// Parses a peer's identifiers. Unknown kinds and the reserved `uid` are ignored. A `default-route` that is not a
    /// Go boolean is false. Only the first `default-route` and the first `zone` count.
    ///
    /// # Errors
    /// A `;`, an invalid percent escape, too many identifiers, or an identifier that is too long.
    pub fn parse(query: &str) -> Result<Self, IdentifiersError> {
        Self::read(query, |_kind| Ok(()))
    }

    /// Parses an agent's own `--agent-identifiers`: as [`Self::parse`], but an unknown kind is an error.
    ///
    /// # Errors
    /// As [`Self::parse`], and [`IdentifiersError::UnknownKind`].
    pub fn parse_flag(query: &str) -> Result<Self, IdentifiersError> {
        Self::read(query, |kind| {
            Err(IdentifiersError::UnknownKind(Excerpt(kind).to_string()))
        })
    }

    fn read(
        query: &str,
        unknown: impl Fn(&str) -> Result<(), IdentifiersError>,
    ) -> Result<Self, IdentifiersError> {
        let mut read = Self::default();
        let mut default_route = None;
        for (index, pair) in query.split('&').filter(|pair| !pair.is_empty()).enumerate() {
            if pair.contains(';') {
                return Err(IdentifiersError::Semicolon);
            }
            if index == IDENTIFIERS_MAX {
                return Err(IdentifiersError::TooMany);
            }
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (unescape(key)?, unescape(value)?);
            match key.as_str() {
                "ipv4" => read.ipv4.push(bounded("ipv4", value)?),
                "ipv6" => read.ipv6.push(bounded("ipv6", value)?),
                "host" => read.host.push(bounded("host", value)?),
                "cidr" => read.cidr.push(bounded("cidr", value)?),
                "default-route" => {
                    default_route.get_or_insert_with(|| parse_go_bool(&value) == Some(true));
                }
                "zone" => {
                    let zone = bounded("zone", value)?;
                    read.zone.get_or_insert(zone);
                }
                other => unknown(other)?,
            }
        }
        read.default_route = default_route.unwrap_or(false);
        Ok(read)
    }

    /// The header value: ASCII only, kinds sorted by name as in Go.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut out = String::new();
        for value in &self.cidr {
            push_pair(&mut out, "cidr", value);
        }
        if self.default_route {
            push_pair(&mut out, "default-route", "true");
        }
        for (kind, values) in [
            ("host", &self.host),
            ("ipv4", &self.ipv4),
            ("ipv6", &self.ipv6),
        ] {
            for value in values {
                push_pair(&mut out, kind, value);
            }
        }
        if let Some(zone) = &self.zone {
            push_pair(&mut out, "zone", zone);
        }
        out
    }
}

/// Parses the values of Go's `strconv.ParseBool`.
#[must_use]
pub fn parse_go_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// Decodes `%xx` and `+`. Bytes that are not UTF-8 become U+FFFD: such a value matches no destination, and refusing the
/// agent would be stricter than upstream.
fn unescape(text: &str) -> Result<String, IdentifiersError> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.as_bytes().iter();
    while let Some(&byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => unescape_byte(&mut bytes)?,
            other => other,
        });
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Decodes the two digits after a `%`.
fn unescape_byte(bytes: &mut slice::Iter<'_, u8>) -> Result<u8, IdentifiersError> {
    let rest = bytes.as_slice();
    let digits = (
        bytes.next().copied().and_then(hex_value),
        bytes.next().copied().and_then(hex_value),
    );
    if let (Some(high), Some(low)) = digits {
        return Ok(high << 4 | low);
    }
    let shown = String::from_utf8_lossy(rest.get(..2).unwrap_or(rest));
    Err(IdentifiersError::Escape(
        Excerpt(&format!("%{shown}")).to_string(),
    ))
}

fn hex_value(byte: u8) -> Option<u8> {
    char::from(byte)
        .to_digit(16)
        .and_then(|digit| u8::try_from(digit).ok())
}

/// The value, unless it is too long for a registry key.
fn bounded(kind: &'static str, value: String) -> Result<String, IdentifiersError> {
    let bytes = value.len();
    if bytes > IDENTIFIER_LEN_MAX {
        return Err(IdentifiersError::TooLong { kind, bytes });
    }
    Ok(value)
}

/// Appends `key=value`, escaped as by Go's `QueryEscape`.
fn push_pair(out: &mut String, key: &str, value: &str) {
    if !out.is_empty() {
        out.push('&');
    }
    out.push_str(key);
    out.push('=');
    for byte in value.bytes() {
        match byte {
            b' ' => out.push('+'),
            b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Upstream (agents): Identifiers are read by type, with repeats, Go's boolean words and percent-encoding.
    #[test]
    fn each_kind_is_read_and_repeats_keep_their_order() {
        let text = "host=localhost&host=node1.example&cidr=127.0.0.1/16&ipv4=1.2.3.4&ipv4=5.6.7.8&ipv6=100::1&default-route=true";
        let read = Identifiers::parse(text).unwrap();
        assert_eq!(read.host, ["localhost", "node1.example"]);
        assert_eq!(read.cidr, ["127.0.0.1/16"]);
        assert_eq!(read.ipv4, ["1.2.3.4", "5.6.7.8"]);
        assert_eq!(read.ipv6, ["100::1"]);
        assert!(read.default_route);
        assert_eq!(Identifiers::parse("").unwrap(), Identifiers::default());
        assert_eq!(Identifiers::parse("&&host").unwrap().host, [""]);
    }

    #[test]
    fn unknown_kinds_and_uid_are_left_out_by_a_server_and_refused_by_an_agent() {
        let text = "uid=x&CIDR=1&ipv4=1.2.3.4";
        assert_eq!(Identifiers::parse(text).unwrap().encode(), "ipv4=1.2.3.4");
        for (text, kind) in [("uid=x", "uid"), ("ipv4=1.2.3.4&HOST=a", "HOST")] {
            let unknown = IdentifiersError::UnknownKind(kind.to_owned());
            assert_eq!(Identifiers::parse_flag(text), Err(unknown));
        }
        assert!(Identifiers::parse_flag("ipv4=1.2.3.4&default-route=no").is_ok());
    }

    /// Upstream (agents): Identifiers are read by type, with repeats, Go's boolean words and percent-encoding.
    #[test]
    fn default_route_takes_the_boolean_words_of_go_and_its_first_value() {
        let is_default = |words: &str| {
            let read = Identifiers::parse(&format!("default-route={words}"));
            read.unwrap().default_route
        };
        for word in ["1", "t", "T", "TRUE", "true", "True", "1&default-route=0"] {
            assert!(is_default(word), "{word}");
        }
        for word in ["0", "f", "F", "FALSE", "false", "False", "tRUE", "yes", ""] {
            assert!(!is_default(word), "{word}");
        }
        assert!(!is_default("x&default-route=true"));
    }

    /// Upstream (agents): Identifiers are read by type, with repeats, Go's boolean words and percent-encoding.
    #[test]
    fn escapes_apply_to_keys_and_values_and_broken_ones_are_refused() {
        let read = Identifiers::parse("h%6Fst=a%2eb+c%3B%26&host=%C3%A9&host=%ff").unwrap();
        assert_eq!(read.host, ["a.b c;&", "é", "\u{fffd}"]);
        for (text, shown) in [
            ("host=%", "%"),
            ("host=%4", "%4"),
            ("host=%zz", "%zz"),
            ("%g0=1", "%g0"),
        ] {
            let broken = IdentifiersError::Escape(shown.to_owned());
            assert_eq!(Identifiers::parse(text), Err(broken));
        }
        let semicolon = Identifiers::parse("host=a;host=b");
        assert_eq!(semicolon, Err(IdentifiersError::Semicolon));
    }

    /// Limit (sizes): Agent identifier | 255 bytes, then the agent is refused
    #[test]
    fn an_identifier_is_no_longer_than_255_bytes_whatever_its_kind() {
        for kind in ["ipv4", "ipv6", "host", "cidr"] {
            let of = |length: usize| Identifiers::parse(&format!("{kind}={}", "x".repeat(length)));
            assert!(of(IDENTIFIER_LEN_MAX).is_ok());
            let refused = of(IDENTIFIER_LEN_MAX + 1).unwrap_err();
            let bytes = IDENTIFIER_LEN_MAX + 1;
            assert_eq!(refused, IdentifiersError::TooLong { kind, bytes });
            let text = refused.to_string();
            assert!(text.contains(kind) && text.contains("255"), "{text}");
        }
        // The limit applies to the decoded text, not to its escapes.
        let escaped = format!("host={}", "%78".repeat(IDENTIFIER_LEN_MAX));
        assert!(Identifiers::parse(&escaped).is_ok());
    }

    /// Limit (sizes): Identifiers of one link | 1,024
    #[test]
    fn a_flood_of_identifiers_is_refused() {
        let text = "ipv4=1.1.1.1&".repeat(IDENTIFIERS_MAX);
        assert!(Identifiers::parse(&text).is_ok());
        let flood = Identifiers::parse(&format!("{text}host=a"));
        assert_eq!(flood, Err(IdentifiersError::TooMany));
    }

    proptest! {
        #[test]
        fn no_text_panics_the_parser(text in "\\PC*|[%a=&;+]{0,16}") {
            let _ = Identifiers::parse(&text);
        }

        #[test]
        fn identifiers_round_trip_as_ascii(
            ipv4: Vec<String>, ipv6: Vec<String>, host: Vec<String>, cidr: Vec<String>, default_route: bool, zone: Option<String>,
        ) {
            let sent = Identifiers { ipv4, ipv6, host, cidr, default_route, zone };
            let text = sent.encode();
            prop_assert!(text.is_ascii());
            prop_assert_eq!(Identifiers::parse(&text), Ok(sent));
        }
    }
}
