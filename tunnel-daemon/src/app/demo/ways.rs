//! What tunnels travelled on, and what moved their bytes: from the server's own counters.

use std::fmt;

use super::stats::bytes;
use super::world::World;

/// Counts so far, or between two looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ways {
    link: u64,
    lane: u64,
    raw_lane: u64,
    copied: u64,
    spliced: u64,
    uring: bool,
}

impl Ways {
    /// Since the server started.
    pub(super) fn of(world: &World) -> Self {
        let opened = |path| world.series(&format!("adit_tunnels_opened_total{{path=\"{path}\"}}"));
        let moved = |mover| world.series(&format!("adit_relay_bytes_total{{mover=\"{mover}\"}}"));
        Self {
            link: opened("link"),
            lane: opened("lane"),
            raw_lane: opened("raw-lane") + opened("ktls-lane"),
            copied: moved("copy"),
            spliced: moved("splice"),
            uring: world.series("adit_relay_engine{engine=\"io-uring\"}") == 1,
        }
    }

    /// Tunnels on lanes of either kind.
    pub(super) fn on_lanes(self) -> u64 {
        self.lane + self.raw_lane
    }

    /// What came since `before`.
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
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tunnels on lanes, {} on the link, copied by their tasks",
            self.lane, self.link
        )?;
        if self.raw_lane > 0 {
            let driver = if self.uring { "io_uring" } else { "epoll" };
            let (spliced, copied) = (bytes(self.spliced), bytes(self.copied));
            write!(
                f,
                "; {} on raw lanes, relayed with {driver}: {spliced} spliced, {copied} copied",
                self.raw_lane
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_name_what_was_used_and_nothing_else() {
        let framed = Ways {
            lane: 54,
            link: 2,
            ..Ways::default()
        };
        assert_eq!(
            framed.to_string(),
            "54 tunnels on lanes, 2 on the link, copied by their tasks"
        );
        let raw = Ways {
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
