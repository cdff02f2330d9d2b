//! Reads for the forwarding path: an idle connection holds no buffer, a busy one reads in large blocks.
//!
//! Small reads land in a scratch area of the thread and are copied out in their own size. Only a direction that reads in
//! bulk takes blocks, which its pieces share. A thread reuses a block once none of its pieces is left: memory that was just
//! given back to the kernel costs a fault for each page. Where memory is small there are no blocks: a waiting piece keeps
//! its whole block, which no budget counts.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

/// Bytes of a read that is not bulk: with a frame's header still whole TLS records.
const READ_BYTES: usize = 64 * 1024 - 64;
/// Bytes of a block: one large read, or several that share its allocation.
const BLOCK_BYTES: usize = 256 * 1024 - 64;
/// Reads of at least this many bytes make a direction bulk.
const BULK_BYTES: usize = 16 * 1024;

/// Blocks that a thread remembers (2 MiB): those of one bulk direction in flight, from one end to the other.
const BLOCKS_MAX: usize = 8;

/// Further blocks that all threads together may remember.
static ROOM: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Whether directions that read in bulk take blocks.
static IS_BULK_ALLOWED: AtomicBool = AtomicBool::new(true);

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
    static BLOCKS: RefCell<Blocks> = const { RefCell::new(Blocks::new()) };
}

/// Blocks handed out by this thread, wherever their pieces are now.
struct Blocks {
    /// Handles without bytes, which keep their blocks from being freed.
    handles: Vec<BytesMut>,
    /// Index of the handle to drop next when there are too many.
    oldest: usize,
}

impl Blocks {
    const fn new() -> Self {
        Self {
            handles: Vec::new(),
            oldest: 0,
        }
    }

    /// An empty block of [`BLOCK_BYTES`] without another user. A new block is remembered if there is `room`.
    fn take(&mut self, room: &AtomicUsize) -> BytesMut {
        if let Some(free) = self
            .handles
            .iter_mut()
            .find_map(|handle| handle.try_reclaim(BLOCK_BYTES).then_some(handle))
        {
            return free.split_off(0);
        }
        let mut handle = BytesMut::with_capacity(BLOCK_BYTES);
        let block = handle.split_off(0);
        let one_less = |left: usize| left.checked_sub(1);
        if self.handles.len() < BLOCKS_MAX && room.fetch_update(Relaxed, Relaxed, one_less).is_ok()
        {
            self.handles.push(handle);
        } else if let Some(slot) = self.handles.get_mut(self.oldest) {
            *slot = handle;
            self.oldest = (self.oldest + 1) % self.handles.len();
        }
        block
    }
}

fn take_block() -> BytesMut {
    BLOCKS.with_borrow_mut(|blocks| blocks.take(&ROOM))
}

/// Bounds the bytes of blocks that all threads together keep: there may be many threads, and little memory. To be called
/// before they read.
pub fn keep_at_most(bytes: u64) {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    ROOM.store(bytes / BLOCK_BYTES, Relaxed);
}

/// From now on there are no blocks: every read has its own size.
pub fn take_none() {
    IS_BULK_ALLOWED.store(false, Relaxed);
}

/// Whether a read of so many bytes makes its direction bulk.
fn is_bulk(read: usize) -> bool {
    read >= BULK_BYTES && IS_BULK_ALLOWED.load(Relaxed)
}

/// One direction's reads.
#[derive(Debug, Default)]
pub struct BlockReader(Fill);

impl BlockReader {
    /// The next bytes; empty at EOF. `most` bounds them where it is less than a usual read. A direction with little room is
    /// never bulk.
    ///
    /// # Errors
    /// As the stream's own.
    pub fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
        most: usize,
    ) -> Poll<io::Result<Bytes>> {
        let filled = if most <= BULK_BYTES {
            self.0 = Fill::default();
            self.0.poll_fill_at_most(cx, stream, most.max(1))
        } else {
            self.0.poll_fill(cx, stream)
        };
        filled.map_ok(|_count| self.0.take_all())
    }
}

/// Bytes of one direction that were read and not taken, for callers that cut them into pieces and change these in place.
#[derive(Debug, Default)]
pub(super) struct Fill {
    bytes: BytesMut,
    bulk: bool,
}

impl Fill {
    /// With bytes that were read before.
    pub(super) fn with(left: &[u8]) -> Self {
        Self {
            bytes: BytesMut::from(left),
            bulk: false,
        }
    }

    /// Bytes read and not taken.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes read and not taken, once nothing more is to be read.
    pub(super) fn into_bytes(self) -> Bytes {
        self.bytes.freeze()
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Takes `count` bytes if they are there.
    pub(super) fn take(&mut self, count: usize) -> Option<BytesMut> {
        if self.bytes.len() < count {
            return None;
        }
        let taken = self.bytes.split_to(count);
        if self.bytes.is_empty() && !self.bulk {
            self.bytes = BytesMut::new();
        }
        Some(taken)
    }

    /// Takes all bytes. Their block stays only if there is room for another read in it.
    fn take_all(&mut self) -> Bytes {
        let taken = if self.has_room() {
            self.bytes.split()
        } else {
            std::mem::take(&mut self.bytes)
        };
        taken.freeze()
    }

    fn has_room(&self) -> bool {
        self.bytes.capacity() - self.bytes.len() >= READ_BYTES / 2
    }

    /// As [`Self::poll_fill`], but no more than `most` bytes, which is at least one.
    pub(super) fn poll_fill_at_most<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
        most: usize,
    ) -> Poll<io::Result<usize>> {
        with_scratch(cx, stream, most, |read| self.append(read))
    }

    /// In its own size: `extend` would round up, and to the size of the first read while records of it are in use.
    fn append(&mut self, read: &[u8]) {
        let mut all = BytesMut::with_capacity(self.bytes.len() + read.len());
        all.extend_from_slice(&self.bytes);
        all.extend_from_slice(read);
        self.bytes = all;
    }

    /// Reads once; returns how many bytes came, 0 at EOF.
    pub(super) fn poll_fill<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
    ) -> Poll<io::Result<usize>> {
        let was_bulk = self.bulk;
        let polled = if was_bulk {
            if !self.has_room() {
                let mut block = take_block();
                block.extend_from_slice(&self.bytes);
                self.bytes = block;
            }
            tokio_util::io::poll_read_buf(Pin::new(stream), cx, &mut self.bytes)
        } else {
            self.poll_fill_at_most(cx, stream, READ_BYTES)
        };
        self.bulk = matches!(polled, Poll::Ready(Ok(read)) if is_bulk(read));
        if !self.bulk && self.bytes.is_empty() {
            self.bytes = BytesMut::new();
        } else if !self.bulk && was_bulk {
            // The read that ends bulk is small and may wait for long, so it is copied out of its block. So is the beginning
            // of a record: it is less than a record, the rest may never come, and each of many lanes would keep a block that
            // no budget counts.
            self.bytes = BytesMut::from(&self.bytes[..]);
        }
        polled
    }
}

/// Reads once, however much room `bytes` has left, and appends the bytes; returns how many, 0 at EOF. A call that waits
/// holds no buffer, and a small message comes in one piece. A cancelled call has read nothing.
///
/// # Errors
/// As the stream's own.
pub async fn append<S: AsyncRead + Unpin>(
    stream: &mut S,
    bytes: &mut BytesMut,
) -> io::Result<usize> {
    poll_fn(|cx| poll_append(cx, stream, bytes, READ_BYTES)).await
}

/// As [`append`], of at most `most` bytes.
///
/// # Errors
/// As the stream's own.
pub fn poll_append<S: AsyncRead + Unpin>(
    cx: &mut Context<'_>,
    stream: &mut S,
    bytes: &mut BytesMut,
    most: usize,
) -> Poll<io::Result<usize>> {
    with_scratch(cx, stream, most, |read| bytes.extend_from_slice(read))
}

/// Reads once and drops the bytes; returns how many, 0 at EOF.
///
/// # Errors
/// As the stream's own.
pub fn poll_discard<S: AsyncRead + Unpin>(
    cx: &mut Context<'_>,
    stream: &mut S,
) -> Poll<io::Result<usize>> {
    with_scratch(cx, stream, READ_BYTES, |_read| ())
}

/// Reads once into the thread's scratch area, at most `most` bytes; returns how many, 0 at EOF.
fn with_scratch<S: AsyncRead + Unpin>(
    cx: &mut Context<'_>,
    stream: &mut S,
    most: usize,
    read: impl FnOnce(&[u8]),
) -> Poll<io::Result<usize>> {
    SCRATCH.with_borrow_mut(|scratch| {
        let most = most.min(scratch.len());
        let mut buf = ReadBuf::new(scratch.get_mut(..most).unwrap_or_default());
        let polled = Pin::new(stream).poll_read(cx, &mut buf);
        polled.map_ok(|()| {
            read(buf.filled());
            buf.filled().len()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use futures_util::FutureExt as _;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn message_comes_whole_however_little_room_is_left() {
        let (mut near, mut far) = tokio::io::duplex(1024);
        for left in [0, 1, 11, 24] {
            let mut bytes = BytesMut::with_capacity(64);
            bytes.resize(bytes.capacity() - left, b'h');
            let before = bytes.len();
            far.write_all(&[b'm'; 25])
                .await
                .expect("the stream is open");
            assert_eq!(append(&mut near, &mut bytes).await.ok(), Some(25));
            assert_eq!(bytes.get(before..), Some([b'm'; 25].as_slice()));
        }
    }

    #[tokio::test]
    async fn waiting_holds_no_buffer_and_eof_is_zero_bytes() {
        let (mut near, far) = tokio::io::duplex(64);
        let mut bytes = BytesMut::new();
        assert!(append(&mut near, &mut bytes).now_or_never().is_none());
        assert_eq!(bytes.capacity(), 0);
        drop(far);
        assert_eq!(append(&mut near, &mut bytes).await.ok(), Some(0));
    }

    /// Otherwise each of many reads could keep a whole block for a few bytes.
    #[tokio::test]
    async fn a_small_read_after_bulk_keeps_no_block() {
        let (mut near, mut far) = tokio::io::duplex(BLOCK_BYTES);
        let (mut reader, mut fill) = (BlockReader::default(), Fill::default());
        for length in [BULK_BYTES, 5] {
            let sent = vec![b'x'; length];
            far.write_all(&sent).await.expect("the stream is open");
            let read = poll_fn(|cx| reader.poll_read(cx, &mut near, usize::MAX)).await;
            let own = read.ok().and_then(|bytes| bytes.try_into_mut().ok());
            let own = own.expect("a block is known to its thread, too");
            assert_eq!((own.len(), own.capacity()), (length, length));
        }
        for length in [BULK_BYTES, 5] {
            let sent = vec![b'x'; length];
            far.write_all(&sent).await.expect("the stream is open");
            let read = poll_fn(|cx| fill.poll_fill(cx, &mut near)).await;
            assert_eq!(read.ok(), Some(length));
        }
        assert_eq!(fill.bytes().len(), BULK_BYTES + 5);
        assert!(fill.capacity() < 2 * BULK_BYTES, "{}", fill.capacity());
    }

    /// This holds even if nothing more can be read and only a partial record is left.
    ///
    /// Limit (memory): Buffer of an incomplete TLS record on a lane | the bytes of the record received so far
    #[tokio::test]
    async fn an_incomplete_record_keeps_no_block() {
        let (mut near, mut far) = tokio::io::duplex(BLOCK_BYTES);
        let mut fill = Fill::default();
        // The second read uses a block and ends with a partial record.
        for length in [BULK_BYTES, BULK_BYTES + 5] {
            let sent = vec![b'x'; length];
            far.write_all(&sent).await.expect("the stream is open");
            let read = poll_fn(|cx| fill.poll_fill(cx, &mut near)).await;
            assert_eq!(read.ok(), Some(length));
            fill.take(BULK_BYTES).expect("it is there");
        }
        assert!(fill.capacity() > BULK_BYTES, "{}", fill.capacity());
        let waiting = poll_fn(|cx| fill.poll_fill(cx, &mut near)).now_or_never();
        assert!(waiting.is_none() && fill.bytes() == b"xxxxx");
        assert!(fill.capacity() < 1000, "{}", fill.capacity());
    }

    /// Records of the previous read are in use and share its much larger allocation.
    ///
    /// Limit (memory): Buffer of an incomplete TLS record on a lane
    #[tokio::test]
    async fn a_read_after_an_incomplete_record_allocates_only_its_bytes() {
        let (mut near, mut far) = tokio::io::duplex(BLOCK_BYTES);
        let mut fill = Fill::default();
        let mut records = Vec::new();
        for length in [BULK_BYTES - 1, 10] {
            far.write_all(&vec![b'x'; length])
                .await
                .expect("the stream is open");
            let read = poll_fn(|cx| fill.poll_fill(cx, &mut near)).await;
            assert_eq!(read.ok(), Some(length));
            records.push(fill.take(length - 5).expect("it is there"));
        }
        assert!(fill.capacity() < 20, "{}", fill.capacity());
    }

    /// Limit (memory): Free read buffers that are kept for reuse | 8 of 256 KiB per thread; in total 1/32 of the memory
    /// limit. None below 512 MiB
    #[tokio::test]
    async fn where_memory_is_small_no_read_has_a_block() {
        take_none();
        let (mut near, mut far) = tokio::io::duplex(BLOCK_BYTES);
        let (mut reader, mut fill) = (BlockReader::default(), Fill::default());
        for _ in 0..2 {
            let sent = vec![b'x'; 2 * BULK_BYTES];
            far.write_all(&sent).await.expect("the stream is open");
            let read = poll_fn(|cx| reader.poll_read(cx, &mut near, usize::MAX)).await;
            let own = read.ok().and_then(|bytes| bytes.try_into_mut().ok());
            assert_eq!(own.map(|own| own.capacity()), Some(2 * BULK_BYTES));
            far.write_all(&sent).await.expect("the stream is open");
            let read = poll_fn(|cx| fill.poll_fill(cx, &mut near)).await;
            assert_eq!(read.ok(), Some(2 * BULK_BYTES));
            assert_eq!(fill.capacity(), 2 * BULK_BYTES);
            fill.take(2 * BULK_BYTES).expect("it is there");
        }
    }

    #[test]
    fn a_block_is_reused_once_no_slice_of_it_is_left() {
        let mut blocks = Blocks::new();
        let mut first = blocks.take(&ROOM);
        assert_eq!(first.capacity(), BLOCK_BYTES);
        first.extend_from_slice(b"payload");
        let place = first.as_ptr();
        let piece = first.split_to(3).freeze();
        drop(first);
        let second = blocks.take(&ROOM);
        assert_ne!(second.as_ptr(), place, "a piece of the first is left");
        drop(piece);
        let again = blocks.take(&ROOM);
        assert_eq!((again.as_ptr(), again.capacity()), (place, BLOCK_BYTES));
        assert!(again.is_empty());
    }

    /// Limit (memory): Free read buffers that are kept for reuse
    #[test]
    fn blocks_in_use_are_forgotten_when_there_are_too_many() {
        let mut blocks = Blocks::new();
        let held: Vec<BytesMut> = (0..3 * BLOCKS_MAX).map(|_| blocks.take(&ROOM)).collect();
        assert_eq!(blocks.handles.len(), BLOCKS_MAX);
        let newest = held.iter().rev().take(BLOCKS_MAX);
        let newest: Vec<_> = newest.map(|block| block.as_ptr()).collect();
        drop(held);
        let mut taken = Vec::new();
        for _ in 0..BLOCKS_MAX {
            let block = blocks.take(&ROOM);
            assert!(newest.contains(&block.as_ptr()));
            taken.push(block);
        }
    }

    /// Limit (memory): Free read buffers that are kept for reuse
    #[test]
    fn all_threads_together_keep_a_bounded_number_of_blocks() {
        let room = AtomicUsize::new(3);
        let (mut one, mut other) = (Blocks::new(), Blocks::new());
        let of_one: Vec<BytesMut> = (0..2).map(|_| one.take(&room)).collect();
        let of_other: Vec<BytesMut> = (0..BLOCKS_MAX).map(|_| other.take(&room)).collect();
        assert_eq!((one.handles.len(), other.handles.len()), (2, 1));
        // The newest block is reused first.
        let newest = of_other.last().map(|block| block.as_ptr());
        drop((of_one, of_other));
        assert_eq!(Some(other.take(&room).as_ptr()), newest);
    }
}
