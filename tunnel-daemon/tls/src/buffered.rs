//! A read buffer to be put *under* TLS. rustls 0.23 reads at most 4 KiB per system call; through this adapter one call
//! fetches what 32 of them would.
//!
//! A buffer is borrowed from a small per-thread pool only while it holds bytes, so a connection that waits costs nothing
//! here. A connection whose reader falls behind keeps [`READ_BUFFER_BYTES`] until the buffer is empty.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Size of a read buffer: eight full TLS records.
pub const READ_BUFFER_BYTES: usize = 128 << 10;
/// Buffers kept per thread for the next reader (2 MiB). One is enough unless readers stop half-way.
const POOLED_MAX: usize = 16;

thread_local! {
    static POOL: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// Reads through a borrowed buffer; writes go straight to `S`.
#[derive(Debug)]
pub struct ReadBuffered<S> {
    inner: S,
    /// Bytes read and not yet taken; `None` whenever there are none.
    held: Option<Borrowed>,
    /// Where TLS records end, while no read may go beyond a record.
    records: Option<Records>,
}

/// Bytes `from..to` of a buffer of the pool, which gets the buffer back when this is dropped.
#[derive(Debug)]
pub(super) struct Borrowed {
    pub(super) buffer: Box<[u8]>,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Borrowed {
    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.get(self.from..self.to).unwrap_or_default()
    }

    /// Moves what is left into a buffer of its own size: it may wait for long, and many lanes may wait.
    pub(super) fn shrink(&mut self) {
        let rest = self.bytes();
        if rest.len() <= self.buffer.len() / 2 {
            let rest: Box<[u8]> = rest.into();
            (self.from, self.to) = (0, rest.len());
            give_back(std::mem::replace(&mut self.buffer, rest));
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        give_back(std::mem::take(&mut self.buffer));
    }
}

/// How far the reader is into a TLS record: type 1, version 2, length 2, then the payload.
#[derive(Debug, Default)]
struct Records {
    header: [u8; 5],
    header_seen: usize,
    payload_left: usize,
}

impl Records {
    /// How many of the next bytes may be handed out.
    fn allowed(&self) -> usize {
        if self.payload_left > 0 {
            self.payload_left
        } else {
            self.header.len() - self.header_seen
        }
    }

    /// Notes that `bytes`, at most as many as allowed, were handed out.
    fn note(&mut self, bytes: &[u8]) {
        if self.payload_left > 0 {
            self.payload_left -= bytes.len();
            return;
        }
        let end = self.header_seen + bytes.len();
        if let Some(slots) = self.header.get_mut(self.header_seen..end) {
            slots.copy_from_slice(bytes);
        }
        self.header_seen = end;
        if end == self.header.len() {
            let [.., high, low] = self.header;
            self.payload_left = usize::from(u16::from_be_bytes([high, low]));
            self.header_seen = 0;
        }
    }

    fn at_boundary(&self) -> bool {
        self.header_seen == 0 && self.payload_left == 0
    }
}

impl<S> ReadBuffered<S> {
    /// Wraps a stream from which nothing was read ahead. `by_record`: no read goes beyond the end of a TLS record, so that
    /// a session that has processed all its records holds no byte of the next one.
    pub fn new(inner: S, by_record: bool) -> Self {
        Self {
            inner,
            held: None,
            records: by_record.then(Records::default),
        }
    }

    /// From now on reads may go beyond a record.
    pub fn read_freely(&mut self) {
        self.records = None;
    }

    /// Whether the bytes handed out end with a record. False when records are not counted.
    pub fn at_record_end(&self) -> bool {
        self.records.as_ref().is_some_and(Records::at_boundary)
    }

    /// The stream below. Reading from it directly would skip what is held here.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The stream below and the bytes already read from it, for callers that go on without TLS.
    pub fn into_parts(self) -> (S, Vec<u8>) {
        let left = self.held.map(|held| held.bytes().to_vec());
        (self.inner, left.unwrap_or_default())
    }

    /// Hands out held bytes; false when there were none.
    fn take_held(&mut self, out: &mut ReadBuf<'_>) -> bool {
        let Some(held) = &mut self.held else {
            return false;
        };
        let available = held.bytes();
        let allowed = self.records.as_ref().map_or(usize::MAX, Records::allowed);
        let taken = available.len().min(out.remaining()).min(allowed);
        let taken_bytes = available.get(..taken).unwrap_or_default();
        out.put_slice(taken_bytes);
        if let Some(records) = &mut self.records {
            records.note(taken_bytes);
        }
        held.from += taken;
        if held.from == held.to {
            self.held = None;
        }
        true
    }
}

pub fn borrow() -> Box<[u8]> {
    POOL.with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| vec![0; READ_BUFFER_BYTES].into_boxed_slice())
}

pub fn give_back(buffer: Box<[u8]>) {
    POOL.with_borrow_mut(|pool| {
        if pool.len() < POOLED_MAX && buffer.len() == READ_BUFFER_BYTES {
            pool.push(buffer);
        }
    });
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadBuffered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if out.remaining() == 0 || self.take_held(out) {
            return Poll::Ready(Ok(()));
        }
        if out.remaining() >= READ_BUFFER_BYTES && self.records.is_none() {
            return Pin::new(&mut self.inner).poll_read(cx, out);
        }
        let mut buffer = borrow();
        let mut space = ReadBuf::new(&mut buffer);
        let polled = Pin::new(&mut self.inner).poll_read(cx, &mut space);
        let to = space.filled().len();
        if to == 0 {
            // Waiting, failed or at EOF: a reader that waits holds no memory.
            give_back(buffer);
            return polled;
        }
        self.held = Some(Borrowed {
            buffer,
            from: 0,
            to,
        });
        ready!(polled)?;
        self.take_held(out);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadBuffered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{collections::VecDeque, task::Waker};

    /// Answers each read with the next step of a script: a chunk, or `Pending` once.
    struct Scripted {
        steps: VecDeque<Option<Vec<u8>>>,
        reads: usize,
    }

    impl AsyncRead for Scripted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.reads += 1;
            match self.steps.pop_front() {
                None => Poll::Ready(Ok(())),
                Some(None) => Poll::Pending,
                Some(Some(mut chunk)) => {
                    let rest = chunk.split_off(chunk.len().min(out.remaining()));
                    out.put_slice(&chunk);
                    if !rest.is_empty() {
                        self.steps.push_front(Some(rest));
                    }
                    Poll::Ready(Ok(()))
                }
            }
        }
    }

    fn scripted(steps: impl IntoIterator<Item = Option<Vec<u8>>>) -> ReadBuffered<Scripted> {
        let steps = steps.into_iter().collect();
        ReadBuffered::new(Scripted { steps, reads: 0 }, false)
    }

    /// One read of at most `size` bytes: the bytes, or `None` if it would wait.
    fn read(stream: &mut ReadBuffered<Scripted>, size: usize) -> Option<Vec<u8>> {
        let mut space = vec![0; size];
        let mut out = ReadBuf::new(&mut space);
        match Pin::new(stream).poll_read(&mut Context::from_waker(Waker::noop()), &mut out) {
            Poll::Ready(result) => result.map(|()| Some(out.filled().to_vec())).unwrap(),
            Poll::Pending => None,
        }
    }

    proptest! {
        #[test]
        fn bytes_come_out_as_they_went_in(
            steps in proptest::collection::vec(proptest::option::of(1_usize..300_000), 0..8),
            sizes in proptest::collection::vec(1_usize..200_000, 1..8),
        ) {
            let mut next = 0_u8;
            let chunks: Vec<Option<Vec<u8>>> = steps
                .iter()
                .map(|len| len.map(|len| (0..len).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect()))
                .collect();
            let expected: Vec<u8> = chunks.iter().flatten().flatten().copied().collect();
            let mut stream = scripted(chunks);
            let mut got = Vec::new();
            for size in sizes.iter().cycle() {
                match read(&mut stream, *size) {
                    Some(bytes) if bytes.is_empty() => break,
                    Some(bytes) => got.extend(bytes),
                    None => prop_assert!(stream.held.is_none()),
                }
            }
            prop_assert_eq!(got, expected);
            prop_assert!(stream.held.is_none());
        }
    }

    #[test]
    fn many_small_reads_cost_one_read_below() {
        let mut stream = scripted([Some(vec![7; READ_BUFFER_BYTES])]);
        for _ in 0..32 {
            assert_eq!(read(&mut stream, 4096).map(|bytes| bytes.len()), Some(4096));
        }
        assert_eq!(stream.inner().reads, 1);
    }

    #[test]
    fn waiting_stream_holds_no_buffer() {
        let mut stream = scripted([Some(vec![1; 10]), None]);
        assert_eq!(read(&mut stream, 4), Some(vec![1; 4]));
        assert_eq!(stream.held.as_ref().unwrap().bytes().len(), 6);
        assert_eq!(read(&mut stream, 100), Some(vec![1; 6]));
        assert_eq!(read(&mut stream, 100), None);
        assert!(stream.held.is_none());
    }

    #[test]
    fn parts_return_what_was_read_ahead() {
        let mut stream = scripted([Some(b"hello world".to_vec())]);
        assert_eq!(read(&mut stream, 6), Some(b"hello ".to_vec()));
        assert_eq!(stream.into_parts().1, b"world");
    }

    #[test]
    fn empty_read_takes_nothing() {
        let mut stream = scripted([Some(vec![1; 10])]);
        assert_eq!(read(&mut stream, 0), Some(vec![]));
        assert_eq!(stream.inner().reads, 0);
    }
}
