//! Bounds on answers that are queued for gRPC clients.

use crate::support::raw::Connection;
use crate::support::world::World;

/// Otherwise its answers would stay queued in HTTP/2, outside every budget, until the connection ends.
///
/// Limit (peers): Answers to packets without a tunnel before a client's call is reset | 16
/// Limit (memory): Answers and trailers queued for a gRPC client | 16 answers per call; a call without room for them is
/// reset
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_ends_a_call_without_room_for_answers_is_reset() {
    /// HTTP/2 window for one answer and a part of the next. The client never updates it.
    const WINDOW: u32 = 50;
    let (world, _agent) = World::with_agent().await;
    let connection = Connection::small_window_client(&world, WINDOW).await;
    let mut call = connection.proxy().await;
    for _packet in 0..4 {
        call.close(5);
    }
    call.headers().await.expect("an answer");
    call.keep(1).await;
    call.finish();
    assert_eq!(call.reset().await, Some(h2::Reason::CANCEL));
}
