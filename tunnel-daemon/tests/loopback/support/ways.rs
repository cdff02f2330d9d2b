//! Paths of tunnels between a server and an agent.

use adit_relay::{Preference, probe};

use crate::support::skip::skip_unprivileged;

/// TLS lanes, or plaintext lanes on which tunnels of CONNECT clients are raw lanes, with one of the relay's drivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Tls,
    Epoll,
    IoUring,
}

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::Tls, Self::Epoll, Self::IoUring];

    /// Flags that server and agent need for this path.
    pub(crate) fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Tls => &[],
            Self::Epoll => &["--lane-security=plaintext", "--relay-engine=epoll"],
            Self::IoUring => &["--lane-security=plaintext", "--relay-engine=io-uring"],
        }
    }

    /// Whether tunnels may be raw lanes.
    pub(crate) fn has_raw_lanes(self) -> bool {
        self != Self::Tls
    }

    /// Whether this host allows the driver. If not, `test` is reported as skipped, and fails as root where `CI` is set.
    pub(crate) fn is_possible(self, test: &str) -> bool {
        if self != Self::IoUring {
            return true;
        }
        let Err(why) = probe(Preference::IoUring) else {
            return true;
        };
        skip_unprivileged(test, why);
        false
    }
}

/// As [`Way::is_possible`], for a value of `--relay-engine`.
pub(crate) fn engine_is_possible(engine: &str, test: &str) -> bool {
    engine != "io-uring" || Way::IoUring.is_possible(test)
}
