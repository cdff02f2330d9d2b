//! Which `:authority` values the `http` crate accepts, and the replacement of the others.

/// Most colons that the `http` crate accepts: enough for a bracketed IPv6 address and a port.
const COLONS_MAX: u32 = 8;

/// Whether `http::uri::Authority` accepts the whole `value`.
///
/// A property test compares this with the real parser in both directions. If too strict, a valid value is replaced; no
/// component routes by `:authority`. If too lax, `h2` answers the request with a stream reset.
#[must_use]
pub fn is_valid_authority(value: &[u8]) -> bool {
    if value.is_empty() {
        return false;
    }
    let mut seen = Seen::default();
    value.iter().all(|&byte| seen.accept(byte)) && seen.complete()
}

/// The replacement for a refused value: same length; valid unless the value is empty.
///
/// Unreserved characters stay, so that the socket path remains recognisable in logs; all others become `-`.
#[must_use]
pub fn stand_in(value: &[u8]) -> Vec<u8> {
    value
        .iter()
        .map(|&byte| if is_unreserved(byte) { byte } else { b'-' })
        .collect()
}

/// The parser state that decides whether an authority is valid.
#[derive(Default)]
struct Seen {
    /// Colons since the start, the last `@` or the closing bracket.
    colons: u32,
    opened: bool,
    closed: bool,
    /// A percent sign outside a user name or IPv6 zone: no later `@` or closing bracket followed.
    percent: bool,
    /// The latest byte was `@`: no host yet.
    bare_at: bool,
}

impl Seen {
    /// Takes one byte; false if no valid authority continues with this byte.
    fn accept(&mut self, byte: u8) -> bool {
        self.bare_at = byte == b'@';
        match byte {
            b'%' => self.percent = true,
            b':' if self.colons >= COLONS_MAX => return false,
            b':' => self.colons += 1,
            b'[' if self.percent || self.opened => return false,
            b'[' => self.opened = true,
            b']' if !self.opened || self.closed => return false,
            b']' => {
                self.closed = true;
                self.colons = 0;
                self.percent = false;
            }
            b'@' => {
                self.colons = 0;
                self.percent = false;
            }
            _ => return is_unreserved(byte) || is_sub_delimiter(byte),
        }
        true
    }

    /// Whether the authority may end here.
    fn complete(&self) -> bool {
        self.opened == self.closed && self.colons <= 1 && !self.percent && !self.bare_at
    }
}

/// RFC 3986, section 2.3.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// RFC 3986, section 2.2.
fn is_sub_delimiter(byte: u8) -> bool {
    matches!(
        byte,
        b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'='
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The parser whose verdict this module predicts.
    fn http_accepts(value: &[u8]) -> bool {
        http::uri::Authority::try_from(value).is_ok()
    }

    #[test]
    fn both_forms_of_a_socket_path_are_refused() {
        assert!(!is_valid_authority(b"/run/konnectivity/server.sock"));
        assert!(!is_valid_authority(b"%2Frun%2Fkonnectivity%2Fserver.sock"));
    }

    #[test]
    fn ordinary_authorities_are_accepted() {
        for value in [
            "localhost",
            "10.0.0.1:8091",
            "[fd00::1]:8091",
            "[fe80::1%25eth0]:1",
            "u%20:p@h:1",
        ] {
            assert!(is_valid_authority(value.as_bytes()), "{value}");
        }
    }

    #[test]
    fn a_stand_in_resembles_the_path() {
        assert_eq!(stand_in(b"%2Frun%2Fx.sock"), b"-2Frun-2Fx.sock");
    }

    #[test]
    fn every_single_byte_is_judged_like_the_http_crate() {
        for byte in 0..=u8::MAX {
            for value in [
                vec![byte],
                vec![b'a', byte],
                vec![byte, b'a'],
                vec![b'a', byte, b'a'],
            ] {
                assert_eq!(
                    is_valid_authority(&value),
                    http_accepts(&value),
                    "{value:?}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn likely_texts_are_judged_like_the_http_crate(value in "[a%:@\\[\\]/?#2-]{0,14}") {
            prop_assert_eq!(is_valid_authority(value.as_bytes()), http_accepts(value.as_bytes()));
        }

        #[test]
        fn random_bytes_are_judged_like_the_http_crate(value in prop::collection::vec(any::<u8>(), 0..24)) {
            prop_assert_eq!(is_valid_authority(&value), http_accepts(&value));
        }

        #[test]
        fn a_stand_in_has_the_same_length_and_is_accepted(value in prop::collection::vec(any::<u8>(), 1..200)) {
            let replaced = stand_in(&value);
            prop_assert_eq!(replaced.len(), value.len());
            prop_assert!(is_valid_authority(&replaced) && http_accepts(&replaced));
        }
    }
}
