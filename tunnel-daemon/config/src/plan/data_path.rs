//! How tunnels travel between Adit ends, and what moves their bytes where the kernel can do it.

use std::str::FromStr;

use adit_relay::Preference;

/// What protects the bytes of a lane behind its greeting, which is always mutual TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LaneSecurity {
    /// The same TLS session.
    #[default]
    Tls,
    /// The same session, done by the kernel for tunnels without frames, if both ends are told so and can.
    Ktls,
    /// Nothing, if both ends are told so: the network below is trusted.
    Plaintext,
}

impl LaneSecurity {
    /// As in flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Ktls => "ktls",
            Self::Plaintext => "plaintext",
        }
    }
}

impl FromStr for LaneSecurity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "tls" => Ok(Self::Tls),
            "ktls" => Ok(Self::Ktls),
            "plaintext" => Ok(Self::Plaintext),
            _ => Err(format!(
                "{text:?} is not known: write tls, ktls or plaintext"
            )),
        }
    }
}

/// Lanes and relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataPathPlan {
    /// Lanes of one link; 0: none.
    pub lanes_max: u32,
    /// Their protection.
    pub lane_security: LaneSecurity,
    /// What drives the relay of pairs of sockets.
    pub relay_engine: Preference,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_security_that_is_not_known_names_those_that_are() {
        for security in [
            LaneSecurity::Tls,
            LaneSecurity::Ktls,
            LaneSecurity::Plaintext,
        ] {
            assert_eq!(security.name().parse(), Ok(security));
        }
        for text in ["", "TLS", "none"] {
            let error = text.parse::<LaneSecurity>().unwrap_err();
            assert!(error.contains("tls, ktls or plaintext"), "{error}");
        }
    }
}
