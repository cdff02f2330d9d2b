//! Paths of open tunnels, from the server's own table, the one behind `/v1/tunnels`.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::world::World;
use adit_telemetry::labels::{ClientDialect, Driver, Engine, Path};
use adit_telemetry::tunnels::TunnelView;
use adit_telemetry::{OpenTunnels, TunnelSide};

/// The server counts bytes after the write that hands them to the client, so the client may read them first.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two polls; a second one is rare.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Path of a tunnel, and what moves its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    path: Path,
    engine: Engine,
    driver: Driver,
    /// The lanes are in clear text.
    in_clear: bool,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match (self.path, self.in_clear) {
            (Path::Link, _) => "on the link",
            (Path::Lane, false) => "on a TLS lane",
            (Path::Lane, true) => "on a lane in clear text",
            (Path::RawLane, _) => "on a raw lane in clear text",
            (Path::KtlsLane, _) => "on a raw lane with kernel TLS",
        };
        let mover = match (self.engine, self.path, self.in_clear) {
            (Engine::Splice, ..) => "spliced",
            (Engine::Copy, Path::Lane, false) => "TLS copy",
            (Engine::Copy, ..) => "copied",
        };
        let engine = match self.driver {
            Driver::Task => "tokio",
            Driver::Epoll => "epoll",
            Driver::IoUring => "io_uring",
        };
        write!(f, "{place}, {mover} by {engine}")
    }
}

/// Paths of some tunnels, each with its number of tunnels.
#[derive(Default)]
pub(super) struct Used(Vec<(Way, u64)>);

impl Used {
    /// Counts one more tunnel.
    pub(super) fn add(&mut self, way: Way) {
        match self.0.iter_mut().find(|(known, _)| *known == way) {
            Some((_, count)) => *count += 1,
            None => self.0.push((way, 1)),
        }
    }

    /// Appends the paths to `text`, if there are any.
    #[must_use]
    pub(super) fn behind(&self, text: String) -> String {
        match &self.0[..] {
            [] => text,
            [(way, 1)] => format!("{text}; {way}"),
            ways => ways
                .iter()
                .fold(text, |text, (way, count)| format!("{text}; {count} {way}")),
        }
    }
}

/// Asks the server about tunnels that are opened in sequence.
pub(super) struct TunnelTable<'a> {
    world: &'a World,
    in_clear: bool,
    /// Id of the newest tunnel asked about.
    last: AtomicU64,
}

impl<'a> TunnelTable<'a> {
    /// The table of this demo's server.
    #[must_use]
    pub(super) fn of(world: &'a World) -> Self {
        Self {
            world,
            in_clear: world.lanes_are_in_clear(),
            last: AtomicU64::new(0),
        }
    }

    /// The path of the newest open tunnel to `target` that has moved this many bytes.
    ///
    /// # Errors
    /// The server has no such tunnel.
    pub(super) async fn newest(
        &self,
        dialect: ClientDialect,
        target: SocketAddr,
        down: u64,
        up: u64,
    ) -> anyhow::Result<Way> {
        let wanted = Wanted {
            behind: self.last.load(Relaxed),
            dialect,
            destination: &target.to_string(),
            down,
            up,
        };
        let since = Instant::now();
        loop {
            if let Some(view) = wanted.newest(self.world.server.metrics.adit().open_tunnels()) {
                self.last.store(view.id, Relaxed);
                return Ok(Way {
                    path: view.path,
                    engine: view.engine,
                    driver: view.driver,
                    in_clear: self.in_clear,
                });
            }
            ensure!(
                since.elapsed() < PATIENCE,
                "the server tells of no open tunnel to {target} that has moved {down} bytes down and {up} up"
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// The tunnel to find. Includes its byte counts: the mover may still change until all bytes are counted.
struct Wanted<'a> {
    /// The tunnel's id is above this one.
    behind: u64,
    dialect: ClientDialect,
    destination: &'a str,
    down: u64,
    up: u64,
}

impl Wanted<'_> {
    fn newest(&self, table: &OpenTunnels) -> Option<TunnelView> {
        let (now, side) = (Instant::now(), TunnelSide::Client(self.dialect));
        let open = table.all().into_iter();
        open.filter(|live| live.id() > self.behind && live.destination() == self.destination)
            .map(|live| live.view(now))
            .filter(|view| {
                let moved = view.bytes_to_client >= self.down && view.bytes_to_target >= self.up;
                moved && view.side == side
            })
            .max_by_key(|view| view.id)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use adit_telemetry::{TunnelEntry, TunnelFacts};

    const FRAMED: Way = Way {
        path: Path::Lane,
        engine: Engine::Copy,
        driver: Driver::Task,
        in_clear: false,
    };

    #[test]
    fn tunnels_are_described_by_path_engine_and_driver() {
        let raw = Way {
            path: Path::RawLane,
            in_clear: true,
            driver: Driver::Epoll,
            ..FRAMED
        };
        for (way, text) in [
            (FRAMED, "on a TLS lane, TLS copy by tokio"),
            (
                Way {
                    in_clear: true,
                    ..FRAMED
                },
                "on a lane in clear text, copied by tokio",
            ),
            (
                Way {
                    path: Path::Link,
                    ..FRAMED
                },
                "on the link, copied by tokio",
            ),
            (raw, "on a raw lane in clear text, copied by epoll"),
            (
                Way {
                    path: Path::KtlsLane,
                    engine: Engine::Splice,
                    driver: Driver::IoUring,
                    ..FRAMED
                },
                "on a raw lane with kernel TLS, spliced by io_uring",
            ),
        ] {
            assert_eq!(way.to_string(), text);
        }
    }

    #[test]
    fn equal_tunnels_are_counted() {
        let link = Way {
            path: Path::Link,
            ..FRAMED
        };
        let mut used = Used::default();
        let text = |used: &Used| used.behind("fine".to_owned());
        assert_eq!(text(&used), "fine");
        used.add(link);
        assert_eq!(text(&used), "fine; on the link, copied by tokio");
        used.add(FRAMED);
        used.add(FRAMED);
        assert_eq!(
            text(&used),
            "fine; 1 on the link, copied by tokio; 2 on a TLS lane, TLS copy by tokio"
        );
    }

    #[test]
    fn a_tunnel_is_found_once_all_its_bytes_are_counted() {
        let table = Arc::new(OpenTunnels::default());
        let open = |dialect, destination| -> TunnelEntry {
            table.enter(&TunnelFacts {
                side: TunnelSide::Client(dialect),
                peer: "agent",
                principal: None,
                link: 1,
                destination,
                path: Path::Lane,
            })
        };
        let wanted = Wanted {
            behind: 1,
            dialect: ClientDialect::HttpConnect,
            destination: "a:1",
            down: 100,
            up: 2,
        };
        // An earlier tunnel and tunnels that do not match.
        let others = [
            open(ClientDialect::HttpConnect, "a:1"),
            open(ClientDialect::Grpc, "a:1"),
            open(ClientDialect::HttpConnect, "b:1"),
        ];
        others.iter().for_each(|other| other.live().moved(2, 100));
        let ours = open(ClientDialect::HttpConnect, "a:1");
        for (up, down) in [(0, 0), (2, 99), (1, 100)] {
            ours.live().moved(up, down);
            assert!(wanted.newest(&table).is_none(), "{up} up, {down} down");
        }
        ours.live().moved(2, 100);
        let found = wanted.newest(&table).map(|view| view.id);
        assert_eq!(found, Some(ours.live().id()));
    }
}
