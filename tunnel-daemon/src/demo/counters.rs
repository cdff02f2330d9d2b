//! Paths of tunnels and movers of their bytes, from the server's own counters.

use std::fmt;

use super::stats::bytes;
use super::world::World;

/// Counts since the start, or between two samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counters {
    /// Tunnels on links.
    pub(super) link: u64,
    /// Tunnels in frames on lanes.
    pub(super) lane: u64,
    /// Tunnels on raw lanes.
    pub(super) raw_lane: u64,
    /// Payload bytes copied by raw-lane tunnels that have ended.
    pub(super) copied: u64,
    /// Payload bytes spliced by raw-lane tunnels that have ended.
    pub(super) spliced: u64,
    /// Relay threads wait with io_uring, not epoll.
    pub(super) uring: bool,
}

impl Counters {
    /// Counts since the server started.
    pub(super) fn of(world: &World) -> Self {
        let opened = |path| world.series(&format!("adit_tunnels_opened_total{{path=\"{path}\"}}"));
        let moved = |mover| world.series(&format!("adit_relay_bytes_total{{mover=\"{mover}\"}}"));
        Self {
            link: opened("link"),
            lane: opened("lane"),
            raw_lane: opened("raw-lane") + opened("ktls-lane"),
            copied: moved("copy"),
            spliced: moved("splice"),
            uring: world.has("adit_relay_tunnels{driver=\"io-uring\"}"),
        }
    }

    /// Tunnels on lanes, framed or raw.
    pub(super) fn on_lanes(self) -> u64 {
        self.lane + self.raw_lane
    }

    /// Counts since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            link: self.link - before.link,
            lane: self.lane - before.lane,
            raw_lane: self.raw_lane - before.raw_lane,
            copied: self.copied - before.copied,
            spliced: self.spliced - before.spliced,
            uring: self.uring,
        }
    }

    /// Text about framed tunnels: their paths, and what moves their bytes.
    pub(super) fn framed(self) -> String {
        let tunnels = if self.lane == 1 { "tunnel" } else { "tunnels" };
        format!(
            "{} {tunnels} on lanes, {} on the link, copied by their tasks",
            self.lane, self.link
        )
    }

    /// Texts about raw-lane tunnels, if there were any: their number, and the bytes by mover.
    pub(super) fn raw(self) -> Option<(String, String)> {
        let driver = if self.uring { "io_uring" } else { "epoll" };
        let (spliced, copied) = (bytes(self.spliced), bytes(self.copied));
        (self.raw_lane > 0).then(|| {
            (
                format!("{} on raw lanes, relayed with {driver}", self.raw_lane),
                format!("{spliced} spliced, {copied} copied"),
            )
        })
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.framed())?;
        if let Some((relayed, moved)) = self.raw() {
            write!(f, "; {relayed}: {moved}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_name_only_used_paths() {
        let framed = Counters {
            lane: 54,
            link: 2,
            ..Counters::default()
        };
        assert_eq!(
            framed.to_string(),
            "54 tunnels on lanes, 2 on the link, copied by their tasks"
        );
        let raw = Counters {
            raw_lane: 3,
            spliced: 64 << 20,
            copied: 1 << 20,
            uring: true,
            ..framed
        };
        let text = raw.since(framed).to_string();
        assert!(
            text.starts_with("0 tunnels on lanes, 0 on the link")
                && text.ends_with(
                    "3 on raw lanes, relayed with io_uring: 64.00 MiB spliced, 1.00 MiB copied"
                ),
            "{text}"
        );
    }
}
