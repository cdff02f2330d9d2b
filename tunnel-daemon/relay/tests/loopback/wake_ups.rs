//! Tests that a relay thread sleeps while nothing changes, whatever conditions its sockets keep reporting.

use std::{
    io::Write as _,
    net::Shutdown,
    thread,
    time::{Duration, Instant},
};

use socket2::Socket;

use crate::support::{Setup, Tunnel, matrix};

matrix!(lasting_conditions_wake_no_thread);

/// Most wake-ups per second, of all tunnels together. Some come from the kernel, such as a late ACK. A poll that
/// completes immediately each time causes tens of thousands.
const WAKE_UPS_MAX: u64 = 100;
/// At least one of so many seconds must be quiet.
const SECONDS_MAX: usize = 15;

/// What a peer of a tunnel has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sends {
    /// It is open in both directions.
    More,
    /// It has half-closed.
    NoMore,
    /// It has closed both directions. A Unix socket reports that at once, a TCP socket at the next write.
    NorReads,
}

/// A peer, and whether it stops reading while the other end has sent more than the path holds.
#[derive(Clone, Copy, Debug)]
struct Peer {
    sends: Sends,
    is_full: bool,
}

impl Peer {
    fn all() -> impl Iterator<Item = Self> {
        let all = [Sends::More, Sends::NoMore, Sends::NorReads];
        all.into_iter()
            .flat_map(|sends| [false, true].map(|is_full| Self { sends, is_full }))
    }
}

/// Limit (isolation): Wake-ups of a relay thread with 72 half-closed, closed or stuck pairs | at most 100 in 1 s
pub(crate) fn lasting_conditions_wake_no_thread(setup: &Setup) {
    let mut world = setup.start();
    world.socket_bytes = Some(32 << 10);
    let mut tunnels = Vec::new();
    for client in Peer::all() {
        for target in Peer::all() {
            for ends_first in [true, false] {
                let tunnel = world.open();
                bring_about(&tunnel, [client, target], ends_first);
                tunnels.push(tunnel);
            }
        }
    }
    let mut counted = Vec::new();
    for _second in 0..SECONDS_MAX {
        let (before, start) = (world.stats().wakeups, Instant::now());
        thread::sleep(Duration::from_secs(1));
        let wake_ups = world.stats().wakeups - before;
        let most = WAKE_UPS_MAX as f64 * start.elapsed().as_secs_f64();
        if wake_ups as f64 <= most {
            return;
        }
        counted.push(wake_ups);
    }
    panic!("{setup:?}: wake-ups of each second: {counted:?}");
}

/// Fills both peers that are to be full, and closes peers before or after that. A peer that fills the other peer always
/// closes after its bytes.
fn bring_about(tunnel: &Tunnel, peers: [Peer; 2], ends_first: bool) {
    let sockets = [&tunnel.client, &tunnel.target];
    for sends in [false, true] {
        for at in [0, 1] {
            if peers[1 - at].is_full == sends {
                if sends {
                    fill(sockets[at]);
                }
                if ends_first {
                    end(sockets[at], peers[at].sends);
                }
            }
        }
    }
    if !ends_first {
        for at in [0, 1] {
            end(sockets[at], peers[at].sends);
        }
    }
}

fn end(socket: &Socket, sends: Sends) {
    // Fails on a tunnel that is already over.
    let _over = match sends {
        Sends::More => Ok(()),
        Sends::NoMore => socket.shutdown(Shutdown::Write),
        Sends::NorReads => socket.shutdown(Shutdown::Both),
    };
}

/// Sends until no byte is taken for a while. If the path is not yet full, sending continues later and makes a second less
/// quiet.
fn fill(mut socket: &Socket) {
    socket.set_nonblocking(true).unwrap();
    let mut refused = 0;
    while refused < 20 {
        match socket.write(&[7; 4096]) {
            Ok(_count) => refused = 0,
            Err(_full) => {
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
