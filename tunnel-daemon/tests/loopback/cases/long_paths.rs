//! A tunnel fills a path of high latency.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::support::lanes::warm;
use crate::support::long_path::{LongPath, Towards};
use crate::support::wait::until;
use crate::support::world::World;
use crate::support::{connect, targets};

/// Delay of the path in each direction.
const DELAY: Duration = Duration::from_millis(100);
/// Bytes that must be in flight at once: several times the initial credit of a tunnel, and 80 Mbit/s on this path.
const UNDER_WAY: usize = 1 << 20;
const PIECE_BYTES: usize = 256 * 1024;

/// Runs an endless transfer through a tunnel until enough bytes are in flight.
async fn fills(lanes: &str, towards: Towards) {
    let world = World::start(&[]).await;
    let path = LongPath::to(world.server().agents, DELAY).await;
    let _agent = world
        .agent_of(path.address.port(), "agent-1", &[lanes])
        .await;
    world.links(1).await;
    if lanes != "--lanes=0" {
        warm(&world).await;
    }
    let what = format!("{UNDER_WAY} bytes under way with {lanes} towards the {towards:?}");
    let enough = until(&what, || path.most_bytes(towards) >= UNDER_WAY);
    let (port, _target) = targets::serve(move |mut stream| async move {
        match towards {
            Towards::Server => send(&mut stream).await,
            Towards::Agent => take(&mut stream).await,
        }
    })
    .await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    let moving = async {
        match towards {
            Towards::Server => take(&mut stream).await,
            Towards::Agent => send(&mut stream).await,
        }
    };
    tokio::select! {
        () = enough => (),
        ended = moving => panic!("the tunnel ended: {ended:?}"),
    }
}

/// Sends until the peer closes. All pieces are equal, because only their volume counts.
async fn send(to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let piece = vec![1; PIECE_BYTES];
    loop {
        to.write_all(&piece).await?;
    }
}

async fn take(from: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    while from.read(&mut piece).await? > 0 {}
    Ok(())
}

/// Limit (memory): Bytes in flight of one tunnel on a path of 100 ms each way | at least 1 MiB, on a lane or the link
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_on_a_lane_fills_a_long_path_in_both_directions() {
    fills("--lanes=4", Towards::Server).await;
    fills("--lanes=4", Towards::Agent).await;
}

/// Limit (memory): Bytes in flight of one tunnel on a path of 100 ms each way
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credit_of_a_tunnel_on_the_link_grows_to_a_long_path_in_both_directions() {
    fills("--lanes=0", Towards::Server).await;
    fills("--lanes=0", Towards::Agent).await;
}
