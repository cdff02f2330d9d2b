//! Our flags for lanes and relay, taken beside those of upstream's programs.

use super::pflag::{Flag, Slot};
use super::server_check::fail;
use crate::error::ConfigError;
use crate::limits;
use crate::plan::DataPathPlan;

/// As typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DataPathOptions {
    pub(super) lanes: i64,
    pub(super) lane_security: String,
    pub(super) relay_engine: String,
}

impl Default for DataPathOptions {
    fn default() -> Self {
        Self {
            lanes: i64::from(limits::LANES_PER_LINK),
            lane_security: "tls".to_owned(),
            relay_engine: "auto".to_owned(),
        }
    }
}

impl DataPathOptions {
    /// `lanes`: the name of the flag with the number of lanes; `help` its words.
    pub(super) fn flags(&mut self, lanes: &'static str, help: &'static str) -> [Flag<'_>; 3] {
        [
            Flag::new(lanes, Slot::Int(&mut self.lanes), help),
            Flag::new(
                "lane-security",
                Slot::Text(&mut self.lane_security),
                "what protects lanes behind their mutual TLS greeting: tls, ktls for tunnels without frames on kernel TLS, or plaintext on a network that is trusted",
            ),
            Flag::new(
                "relay-engine",
                Slot::Text(&mut self.relay_engine),
                "what drives the relay of sockets in clear text: auto, io-uring or epoll",
            ),
        ]
    }

    /// Checks and maps.
    pub(super) fn plan(&self, lanes: &str) -> Result<DataPathPlan, ConfigError> {
        let named = |flag: &'static str| move |why| ConfigError::new(format!("{flag}: {why}"));
        let lanes_max = u32::try_from(self.lanes).or_else(|_out_of_range| {
            let (value, max) = (self.lanes, u32::MAX);
            fail(format!(
                "{lanes} {value} must be between 0, which is no lanes, and {max}"
            ))
        })?;
        Ok(DataPathPlan {
            lanes_max,
            lane_security: self
                .lane_security
                .parse()
                .map_err(named("--lane-security"))?,
            relay_engine: self.relay_engine.parse().map_err(named("--relay-engine"))?,
        })
    }
}
