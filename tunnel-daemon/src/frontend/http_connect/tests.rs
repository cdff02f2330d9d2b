//! Request heads that do not end, on paused time.

use adit_core::registry::Registry;
use tokio::io::duplex;
use tokio::time::Instant;

use super::*;
use crate::hub::DialLimits;
use crate::telemetry::{AccessLog, ServerMetrics};

/// How long a client that sends one byte a second keeps its connection.
async fn kept(plan: ConnectPlan) -> Duration {
    let limits = DialLimits {
        pending_max: 1,
        timeout: None,
    };
    let hub = Hub::new(Registry::new("default".parse().unwrap()), limits);
    let metrics = ServerMetrics::new(&["default"]);
    let access = Arc::new(AccessLog::new(
        1,
        1,
        metrics.adit().access_events_suppressed(),
    ));
    let context = FrontendContext { metrics, access };
    let (mut client, server) = duplex(64);
    let started = Instant::now();
    let serving = async {
        serve(server, &hub, &context, plan, "client").await;
        started.elapsed()
    };
    let trickling = async {
        client.write_all(b"CONNECT a:1 HTTP/1.1\r\nX: ").await?;
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            client.write_all(b"x").await?;
        }
        #[expect(unreachable_code, reason = "names the type of the errors above")]
        std::io::Result::Ok(())
    };
    let (kept, _cut) = tokio::join!(serving, trickling);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert!(answer.is_empty(), "upstream says nothing: {answer:?}");
    kept
}

#[tokio::test(start_paused = true)]
async fn a_head_that_trickles_in_is_cut_after_sixty_seconds() {
    assert_eq!(kept(ConnectPlan::default()).await, Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn another_time_for_the_head_is_kept_to() {
    let plan = ConnectPlan {
        head_timeout: Duration::from_secs(7),
        ..ConnectPlan::default()
    };
    assert_eq!(kept(plan).await, Duration::from_secs(7));
}
