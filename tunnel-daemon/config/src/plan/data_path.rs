//! How tunnels travel between Adit ends, and how the kernel relays their bytes where it can.

use std::str::FromStr;

use adit_relay::Preference;

/// Security of a lane after its greeting, which always uses mutual TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LaneSecurity {
    /// The TLS session of the greeting.
    #[default]
    Tls,
    /// The same session, handled by the kernel for raw lanes, if both ends are configured for it and support it.
    Ktls,
    /// Clear text, if both ends are configured for it: the network is trusted.
    Plaintext,
}

impl LaneSecurity {
    /// The name used in flags.
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
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug)]
#[command(next_help_heading = "Data path")]
pub struct DataPathPlan {
    /// Lanes of one link; 0: none. Each program has its own flag.
    #[arg(skip)]
    pub lanes_max: u32,
    /// What protects lanes after their mutual TLS greeting: tls; ktls, where the kernel encrypts raw lanes; or plaintext,
    /// for trusted networks. ktls and plaintext need the same setting at the other end
    #[arg(long, value_name = "SECURITY", default_value = "tls")]
    pub lane_security: LaneSecurity,
    /// Driver of raw lanes: auto, io-uring or epoll. If the named driver is impossible here, the program does not start.
    /// With io-uring, bytes behind TCP urgent data may wait for later bytes
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub relay_engine: Preference,
}

impl DataPathPlan {
    /// No lanes.
    pub const NONE: Self = Self {
        lanes_max: 0,
        lane_security: LaneSecurity::Tls,
        relay_engine: Preference::Auto,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_lane_security_lists_the_known_values() {
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
