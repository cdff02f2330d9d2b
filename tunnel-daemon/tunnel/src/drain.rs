//! Drains a lane whose tunnel no endpoint uses any more: writes what is queued and drops input, until the lane is clean.

use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::lane::LaneEvent;
use futures_util::FutureExt as _;

use crate::lane::{Lane, LaneFailure};
use adit_config::limits;

/// Time for the peer to answer RESET.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(5);

/// Time for the peer to read what its kernel has acknowledged: some megabytes at 20 KB/s.
const TAKEN_WITHIN: Duration = Duration::from_secs(300);

/// Why a lane cannot be used again.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The lane failed.
    #[error(transparent)]
    Failed(#[from] LaneFailure),
    /// The peer does not confirm the tunnel's end.
    #[error("the peer did not confirm the end of the tunnel")]
    Silent,
    /// The peer has not read the last bytes of the tunnel, which has ended. They are in both kernels and arrive if the
    /// connection is closed in order.
    #[error("the peer does not read the last bytes of the tunnel")]
    Unread,
}

/// Waits until the lane is clean and its peer has read what was sent, so that the next tunnel's OPEN does not queue behind it.
///
/// # Errors
/// [`DrainError`]: close the lane, by RST if the peer does not confirm the tunnel's end.
pub async fn drain(lane: &mut Lane) -> Result<(), DrainError> {
    finish(lane).await?;
    prove(lane).await
}

/// Waits until the lane is clean, for as long as the peer's kernel keeps taking queued bytes. Bytes that this kernel has taken
/// may stay in its buffers for long, which cannot be observed from here.
async fn finish(lane: &mut Lane) -> Result<(), DrainError> {
    // Usually the lane is clean already, and the kernel need not be asked.
    if let Some(clean) = clean(lane).now_or_never() {
        return Ok(clean?);
    }
    let mut before = usize::MAX;
    while !lane.state().is_resetting() {
        let left = lane.unacknowledged_bytes();
        if left >= before {
            break;
        }
        before = left;
        if let Ok(clean) = tokio::time::timeout(patience(before), clean(lane)).await {
            return Ok(clean?);
        }
    }
    lane.end().reset("no progress after its end");
    tokio::time::timeout(ACKNOWLEDGED_WITHIN, clean(lane))
        .await
        .map_or(Err(DrainError::Silent), |clean| Ok(clean?))
}

/// Waits for the peer to read all payload, with the same timeouts as `finish`.
async fn prove(lane: &mut Lane) -> Result<(), DrainError> {
    let mut before = usize::MAX;
    while !lane.is_proven() {
        let proven = std::future::poll_fn(|cx| lane.poll_proven(cx));
        if let Ok(proven) = tokio::time::timeout(patience(before), proven).await {
            return Ok(proven?);
        }
        let left = lane.unacknowledged_bytes();
        if left >= before {
            return Err(DrainError::Unread);
        }
        before = left;
    }
    Ok(())
}

/// How long to wait for progress, with so many bytes that the peer's kernel had not acknowledged.
fn patience(unacknowledged: usize) -> Duration {
    if unacknowledged == 0 {
        TAKEN_WITHIN
    } else {
        limits::LINGER_TIMEOUT
    }
}

async fn clean(lane: &mut Lane) -> Result<(), LaneFailure> {
    std::future::poll_fn(|cx| poll_clean(cx, lane)).await
}

fn poll_clean(cx: &mut Context<'_>, lane: &mut Lane) -> Poll<Result<(), LaneFailure>> {
    loop {
        let flushed = lane.poll_flush(cx)?;
        if lane.state().is_idle() {
            return flushed.map(Ok);
        }
        match lane.poll_event(cx) {
            // The peer may have sent the next OPEN already, which the lane's owner answers.
            Poll::Ready(Ok(LaneEvent::Idle)) if !lane.state().is_idle() => {
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Ok(_void)) => (),
            Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
            Poll::Pending => return Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::pin::pin;

    use adit_core::lane::{FrameReader, LaneRole, OpenRequest};
    use adit_relay::unacknowledged_bytes;
    use bytes::Bytes;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::Instant;

    use super::*;

    /// More than a peer may leave unread, and less than its kernel takes.
    const BYTES: usize = 40_000;

    async fn flush(lane: &mut Lane) {
        let flushed = std::future::poll_fn(|cx| lane.poll_flush(cx)).await;
        flushed.unwrap();
    }

    /// A lane whose tunnel both ends have ended, and its peer, which has not read the last bytes. The peer's kernel has
    /// received them.
    async fn unread() -> (Lane, Lane) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialed = TcpStream::connect(listener.local_addr().unwrap());
        let (dialed, accepted) = tokio::join!(dialed, listener.accept());
        let end = |socket, role| Lane::in_clear(socket, role, FrameReader::default(), Bytes::new());
        let mut peer = end(dialed.unwrap(), LaneRole::Agent);
        let mut lane = end(accepted.unwrap().0, LaneRole::Server);
        let request = OpenRequest {
            protocol: "tcp".to_owned(),
            address: "a:1".to_owned(),
            raw: false,
            origin: None,
            forward: None,
        };
        lane.end().open(&request, 0).unwrap();
        flush(&mut lane).await;
        assert_eq!(peer.event().await.unwrap(), LaneEvent::Open(request));
        peer.end().accept();
        peer.end().fin();
        flush(&mut peer).await;
        for event in [LaneEvent::Opened, LaneEvent::PeerFin] {
            assert_eq!(lane.event().await.unwrap(), event);
        }
        lane.end().send(vec![7; BYTES].into());
        lane.end().fin();
        flush(&mut lane).await;
        assert!(lane.state().is_idle() && !lane.is_proven());
        (lane, peer)
    }

    /// Drains a lane. The kernel's clock is real, so paused time must not advance until the peer's kernel has received
    /// the request. This task yields until then and is never idle.
    async fn drained(lane: &mut Lane) -> Result<(), DrainError> {
        let socket = lane.tcp().unwrap().as_fd().try_clone_to_owned().unwrap();
        let mut draining = pin!(drain(lane));
        assert!(futures_util::poll!(draining.as_mut()).is_pending());
        while unacknowledged_bytes(&socket).unwrap() > 0 {
            tokio::task::yield_now().await;
        }
        draining.await
    }

    /// Limit (times): Bytes in the agent's kernel after a close | read within 5 min, else the lane is cut
    #[tokio::test(start_paused = true)]
    async fn drain_waits_five_minutes_for_unread_last_bytes() {
        let (mut lane, _peer) = unread().await;
        let since = Instant::now();
        let outcome = drained(&mut lane).await;
        assert!(matches!(outcome, Err(DrainError::Unread)), "{outcome:?}");
        // The first 30 s pass before the agent is asked to confirm.
        assert_eq!(since.elapsed().as_secs(), 30 + 300);
    }

    /// A missing answer proves nothing while bytes queued before it may still be read.
    ///
    /// Limit (times): Bytes in the agent's kernel after a close
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_the_last_bytes_after_minutes_keeps_its_lane() {
        let (mut lane, mut peer) = unread().await;
        let reading = async {
            tokio::time::sleep(Duration::from_secs(300)).await;
            // From here on this task is never idle either, so the answer arrives before paused time advances.
            loop {
                let event = std::future::poll_fn(|cx| Poll::Ready(peer.poll_event(cx))).await;
                if let Poll::Ready(Err(failure)) = event {
                    return failure;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            outcome = drained(&mut lane) => outcome.unwrap(),
            failure = reading => panic!("{failure}"),
        }
        assert!(lane.state().is_idle() && lane.is_proven());
    }
}
