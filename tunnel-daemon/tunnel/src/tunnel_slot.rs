//! A tunnel's slot in its link: the channel to its endpoint, and small chunks not handed over yet.
//!
//! Small chunks for an endpoint that is far behind are joined: each takes dozens of times the memory that a budget counts, and
//! the peer controls their size.

use std::sync::Arc;

use adit_core::ids::TunnelKey;
use adit_core::session::TunnelEnd;
use bytes::{Bytes, BytesMut};
use tokio::sync::oneshot;

use crate::channel::Channel;
use crate::task::DialOutcome;

/// Queued pieces from which on an endpoint is far behind.
const BEHIND_PIECES: usize = 64;
/// Pieces below this size are joined for an endpoint that is far behind.
const SMALL_CHUNK_BYTES: usize = 512;
/// Joined chunks are handed over from this size on.
const JOINED_BYTES: usize = 16 * 1024;

pub(super) struct TunnelSlot {
    pub(super) key: TunnelKey,
    pub(super) channel: Arc<Channel>,
    /// `Some` until the dial has an outcome.
    pub(super) reply: Option<oneshot::Sender<DialOutcome>>,
    /// Follows all bytes in the channel.
    small_chunks: BytesMut,
}

impl TunnelSlot {
    pub(super) fn new(
        key: TunnelKey,
        channel: Arc<Channel>,
        reply: Option<oneshot::Sender<DialOutcome>>,
    ) -> Self {
        Self {
            key,
            channel,
            reply,
            small_chunks: BytesMut::new(),
        }
    }

    /// Delivers bytes to the endpoint.
    pub(super) fn deliver(&mut self, bytes: Bytes) {
        let behind =
            || !self.small_chunks.is_empty() || self.channel.down_pieces() >= BEHIND_PIECES;
        if bytes.len() >= SMALL_CHUNK_BYTES || !behind() {
            self.give_small_chunks();
            return self.channel.deliver(bytes);
        }
        self.small_chunks.extend_from_slice(&bytes);
        if self.small_chunks.len() >= JOINED_BYTES {
            self.give_small_chunks();
        } else {
            self.channel.keep_back();
        }
    }

    /// The endpoint has notified the link; it may have emptied its queue.
    pub(super) fn visited(&mut self) {
        if !self.small_chunks.is_empty() && self.channel.down_is_empty() {
            self.give_small_chunks();
        }
    }

    /// The peer has sent EOF.
    pub(super) fn peer_fin(&mut self) {
        self.give_small_chunks();
        self.channel.peer_fin();
    }

    /// The tunnel is over.
    pub(super) fn finish(&mut self, end: TunnelEnd) {
        self.give_small_chunks();
        self.channel.finish(end);
    }

    fn give_small_chunks(&mut self) {
        if !self.small_chunks.is_empty() {
            self.channel.keep_no_more();
            let joined = std::mem::take(&mut self.small_chunks).freeze();
            self.channel.deliver(joined);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Poll;

    use futures_util::poll;
    use futures_util::stream::{FuturesUnordered, StreamExt as _};

    use super::*;
    use crate::{DirtyList, Endpoint, Incoming};

    /// A link's slot for an endpoint, the endpoint, and the dirty list to which it reports.
    fn slot() -> (TunnelSlot, Endpoint, Arc<DirtyList>) {
        let dirty_list = Arc::new(DirtyList::default());
        let (endpoint, channel) = Endpoint::new(&dirty_list);
        let key = TunnelKey {
            slot: 0,
            generation: 0,
        };
        (TunnelSlot::new(key, channel, None), endpoint, dirty_list)
    }

    /// Data queued for the endpoint, chunk by chunk, and the event after it.
    async fn taken(endpoint: &mut Endpoint) -> (Vec<Bytes>, Option<Incoming>) {
        let mut pieces = Vec::new();
        loop {
            match poll!(pin!(endpoint.recv())) {
                Poll::Ready(Incoming::Data(bytes)) => pieces.push(bytes),
                Poll::Ready(other) => return (pieces, Some(other)),
                Poll::Pending => return (pieces, None),
            }
        }
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..=250).cycle().take(length).collect()
    }

    /// Limit (memory): Small chunks queued for a slow endpoint
    #[tokio::test]
    async fn small_chunks_for_a_slow_endpoint_are_coalesced_and_the_last_ones_requested() {
        let (mut slot, mut endpoint, dirty_list) = slot();
        let sent = pattern(40_000);
        for chunk in sent.chunks(1) {
            slot.deliver(Bytes::copy_from_slice(chunk));
        }
        let (mut pieces, end) = taken(&mut endpoint).await;
        assert_eq!((pieces.len(), end), (BEHIND_PIECES + 2, None));
        let asks = dirty_list.take().expect("the endpoint asks for the rest");
        assert!(Arc::ptr_eq(&asks, &slot.channel));
        slot.visited();
        pieces.extend(taken(&mut endpoint).await.0);
        assert_eq!(pieces.len(), BEHIND_PIECES + 3);
        let got: Vec<u8> = pieces.concat();
        assert!(got == sent);
        let one = Bytes::from_static(b"y");
        slot.deliver(one.clone());
        assert_eq!(taken(&mut endpoint).await, (vec![one], None));
    }

    /// After the link has checked the queue, the endpoint may take all of it and wait before the link announces more.
    #[tokio::test]
    async fn a_waiting_endpoint_requests_chunks_that_are_kept_back() {
        let (slot, mut endpoint, dirty_list) = slot();
        // Polls the endpoint only when it has been woken.
        let mut waiting = FuturesUnordered::from_iter([endpoint.recv()]);
        assert!(poll!(waiting.next()).is_pending());
        assert!(dirty_list.take().is_none());
        slot.channel.keep_back();
        assert!(poll!(waiting.next()).is_pending());
        assert!(dirty_list.take().is_some());
    }

    #[tokio::test]
    async fn later_chunks_and_fin_stay_behind_small_chunks() {
        for ends in [false, true] {
            let (mut slot, mut endpoint, _dirty_list) = slot();
            let sent = pattern(1000);
            for chunk in sent.chunks(2) {
                slot.deliver(Bytes::copy_from_slice(chunk));
            }
            let behind = if ends {
                slot.finish(TunnelEnd::PeerClosing);
                Incoming::Ended(TunnelEnd::PeerClosing)
            } else {
                slot.peer_fin();
                Incoming::PeerFin
            };
            let (pieces, end) = taken(&mut endpoint).await;
            let got: Vec<u8> = pieces.concat();
            assert!(got == sent);
            assert_eq!((pieces.len(), end), (BEHIND_PIECES + 1, Some(behind)));
        }
        let (mut slot, mut endpoint, _dirty_list) = slot();
        let sent = pattern(10_000);
        let (small_chunks, large) = sent.split_at(200);
        for chunk in small_chunks.chunks(2) {
            slot.deliver(Bytes::copy_from_slice(chunk));
        }
        slot.deliver(Bytes::copy_from_slice(large));
        let (pieces, _none) = taken(&mut endpoint).await;
        let got: Vec<u8> = pieces.concat();
        assert!(got == sent && pieces.len() == BEHIND_PIECES + 2);
    }
}
