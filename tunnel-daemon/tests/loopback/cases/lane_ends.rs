//! Ends of tunnels that begin at the target, on a lane and on the link: the same for whoever looks at the sockets.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use adit::app::agent::RunningAgent;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::lanes::{BUSY, HITS, value, warm};
use crate::support::wait::{until, within};
use crate::support::world::World;
use crate::support::{connect, targets};

/// More than one write takes, and than a lane has under way.
const BYTES: usize = 3_000_000;

/// A server and an agent whose tunnels ride lanes, or the link.
async fn world(lanes: bool) -> (World, RunningAgent) {
    let flags: &[&str] = if lanes { &[] } else { &["--lanes-per-link=0"] };
    let world = World::start(flags).await;
    let agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    if lanes {
        warm(&world).await;
    }
    (world, agent)
}

/// The tunnel was where it should be, ended for this reason, and left a lane that is as good as new.
async fn ended(world: &World, lanes: bool, reason: &str) {
    let series = format!("adit_tunnels_closed_total{{reason=\"{reason}\"}}");
    world.server_metric(&series, 1.0).await;
    until("the lane comes back", || value(world, BUSY) == 0.0).await;
    let lost = value(world, "adit_lanes_closed_total{reason=\"lost\"}");
    assert_eq!((value(world, HITS), lost), (f64::from(lanes), 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_ends_its_half_first_hears_the_rest() {
    for lanes in [true, false] {
        let (world, _agent) = world(lanes).await;
        let heard = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&heard);
        let (port, _target) = targets::serve(move |mut stream| {
            let counted = Arc::clone(&counted);
            async move {
                stream.write_all(&targets::pattern(0, BYTES)).await?;
                stream.shutdown().await?;
                let mut block = vec![0; 64 * 1024];
                loop {
                    match stream.read(&mut block).await? {
                        0 => return Ok(()),
                        count => counted.fetch_add(count, Relaxed),
                    };
                }
            }
        })
        .await;
        let target = format!("127.0.0.1:{port}");
        let mut stream = connect::open(&world.connect(), &target).await;
        let mut all = Vec::new();
        within("all of it, and its end", stream.read_to_end(&mut all))
            .await
            .expect("in order");
        assert!(all == targets::pattern(0, BYTES), "{} bytes", all.len());
        // The other half is open for as long as the client likes.
        stream.write_all(&all).await.expect("it is taken");
        stream.shutdown().await.expect("a half-close");
        until("the target hears all of it", || {
            heard.load(Relaxed) == BYTES
        })
        .await;
        ended(&world, lanes, "clean").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_breaks_off_in_the_middle_resets_the_client_of_its_tunnel() {
    for lanes in [true, false] {
        let (world, _agent) = world(lanes).await;
        let (port, _target) = targets::resetting().await;
        let target = format!("127.0.0.1:{port}");
        let mut stream = connect::open(&world.connect(), &target).await;
        let sent = targets::pattern(0, BYTES);
        // Some of it may be taken before the end is known.
        let _taken = within("an end of it", stream.write_all(&sent)).await;
        let mut rest = Vec::new();
        match within("the end", stream.read_to_end(&mut rest)).await {
            Ok(_) => assert!(rest.is_empty(), "{} bytes", rest.len()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
        ended(&world, lanes, "target_reset").await;
    }
}
