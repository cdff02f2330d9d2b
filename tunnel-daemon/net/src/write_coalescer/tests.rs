//! Tests of the bytes that HTTP/2 writes against the bytes that reach a scripted stream.

use std::collections::BTreeSet;
use std::task::Waker;

use proptest::prelude::*;
use tokio::time::Instant;

use super::*;
use adit_tls::buffered::READ_BUFFER_BYTES;

/// Takes as many bytes per write as its script says, or returns `Pending` once for a 0; without a script it takes all
/// bytes.
#[derive(Default)]
struct Sink {
    taken: Vec<u8>,
    script: Vec<usize>,
    writes: usize,
    flushes: usize,
    shut: bool,
}

impl AsyncWrite for Sink {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let most = self.script.pop().unwrap_or(usize::MAX);
        if most == 0 {
            return Poll::Pending;
        }
        self.writes += 1;
        let taken = bytes.len().min(most);
        self.taken
            .extend_from_slice(bytes.get(..taken).unwrap_or_default());
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flushes += 1;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shut = true;
        Poll::Ready(Ok(()))
    }
}

fn noop() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// Writes and flushes as HTTP/2 does after each frame. Returns how many bytes were taken before a call returned
/// `Pending`.
fn frame(io: &mut WriteCoalescer<Sink>, bytes: &[u8]) -> usize {
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match Pin::new(&mut *io).poll_write(&mut noop(), rest) {
            Poll::Ready(taken) => written += taken.unwrap(),
            Poll::Pending => return written,
        }
    }
    let _later = Pin::new(io).poll_flush(&mut noop());
    written
}

#[test]
fn frames_of_one_poll_leave_in_one_write() {
    let (mut io, mut flusher) = gather(Sink::default());
    for _frame in 0..7 {
        assert_eq!(frame(&mut io, &[7; 16 << 10]), 16 << 10);
    }
    assert_eq!(lock(&io.0).inner.writes, 0);
    assert!(flusher.poll_flush(&mut noop()).is_ready());
    let state = lock(&io.0);
    assert_eq!((state.inner.writes, state.inner.flushes), (1, 1));
    assert_eq!(state.inner.taken.len(), 7 * (16 << 10));
    assert!(state.held.is_none(), "an idle connection holds no buffer");
}

#[test]
fn small_frames_are_written_and_flushed_at_once() {
    let (mut io, mut flusher) = gather(Sink::default());
    assert_eq!(frame(&mut io, b"ping"), 4);
    assert_eq!(lock(&io.0).inner.taken, b"ping");
    assert_eq!(lock(&io.0).inner.flushes, 1);
    // A small frame after bulk data is written together with it.
    frame(&mut io, &[1; 20_000]);
    frame(&mut io, b"pong");
    assert_eq!(lock(&io.0).inner.taken.len(), 4 + 20_000 + 4);
    assert!(flusher.poll_flush(&mut noop()).is_ready());
}

#[test]
fn full_buffer_is_written_before_more_is_taken() {
    let (mut io, _flusher) = gather(Sink::default());
    let frames = 3 * READ_BUFFER_BYTES / (16 << 10);
    for _frame in 0..frames {
        frame(&mut io, &[3; 16 << 10]);
    }
    let state = lock(&io.0);
    assert_eq!(state.inner.taken.len(), 2 * READ_BUFFER_BYTES);
    assert_eq!(state.inner.writes, 2);
}

/// Limit (memory): HTTP/2 frames queued for a socket | 128 KiB per connection
#[test]
fn blocked_stream_bounds_the_held_bytes() {
    let (mut io, mut flusher) = gather(Sink {
        script: vec![0; 8],
        ..Sink::default()
    });
    let huge = vec![5; 2 * READ_BUFFER_BYTES];
    assert_eq!(frame(&mut io, &huge), READ_BUFFER_BYTES);
    assert!(flusher.poll_flush(&mut noop()).is_pending());
    assert!(lock(&io.0).inner.taken.is_empty());
}

#[test]
fn shutdown_writes_the_held_bytes() {
    let (mut io, _flusher) = gather(Sink::default());
    frame(&mut io, &[9; 10_000]);
    assert!(Pin::new(&mut io).poll_shutdown(&mut noop()).is_ready());
    assert_eq!(lock(&io.0).inner.taken.len(), 10_000);
    assert!(lock(&io.0).inner.shut);
}

const PONG: [u8; 17] = [0, 0, 8, 6, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

#[tokio::test(start_paused = true)]
async fn an_answer_leaves_with_the_next_frame_in_one_write() {
    let (mut io, mut flusher) = gather(Sink::default());
    assert_eq!(frame(&mut io, &PONG), PONG.len());
    assert!(flusher.poll_flush(&mut noop()).is_ready());
    assert_eq!(lock(&io.0).inner.writes, 0);
    frame(&mut io, b"reply");
    assert_eq!(lock(&io.0).inner.taken, [&PONG[..], b"reply"].concat());
    assert_eq!(lock(&io.0).inner.writes, 1);
    // No write is left for the timer.
    sleep(2 * ANSWER_DELAY).await;
    assert!(flusher.poll_flush(&mut noop()).is_ready());
    assert_eq!(lock(&io.0).inner.writes, 1);
    assert!(flusher.delay.is_none());
}

/// Limit (times): Delay of an HTTP/2 PING or SETTINGS acknowledgement to share a write | 5 ms
#[tokio::test(start_paused = true)]
async fn an_answer_leaves_alone_when_nothing_follows() {
    let (mut io, mut flusher) = gather(Sink::default());
    frame(&mut io, &PONG);
    let begun = Instant::now();
    let left = std::future::poll_fn(|cx| {
        let _flushed = flusher.poll_flush(cx);
        if lock(&io.0).inner.taken == PONG {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    });
    // Woken by the timer.
    left.await;
    assert!(begun.elapsed() >= ANSWER_DELAY && begun.elapsed() <= 2 * ANSWER_DELAY);
    assert_eq!(lock(&io.0).inner.writes, 1);
}

#[tokio::test(start_paused = true)]
async fn a_busy_connection_sets_one_timer_for_many_answers() {
    let (mut io, mut flusher) = gather(Sink::default());
    let mut timers = BTreeSet::new();
    for _answer in 0..100 {
        frame(&mut io, &PONG);
        assert!(flusher.poll_flush(&mut noop()).is_ready());
        timers.extend(flusher.delay.as_ref().map(|delay| delay.deadline()));
        frame(&mut io, b"reply");
    }
    assert_eq!(timers.len(), 1);
    assert_eq!(lock(&io.0).inner.writes, 100);
}

#[test]
fn only_answers_are_delayed() {
    let settings = [0, 0, 0, 4, 1, 0, 0, 0, 0];
    let window = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0xff, 0, 0];
    let all = [&settings[..], &window, &PONG].concat();
    for answers in [&settings[..], &window, &PONG, &all] {
        assert!(may_wait(answers));
        assert!(!may_wait(answers.get(1..).unwrap()), "the middle of one");
        let cut = answers.len() - 1;
        assert!(!may_wait(answers.get(..cut).unwrap()), "a part of one");
    }
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let own_settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let of_a_stream = [0, 0, 4, 8, 0, 0, 0, 0, 1, 0x7f, 0xff, 0, 0];
    for other in [&ping[..], &own_settings, &of_a_stream, b""] {
        assert!(!may_wait(other));
    }
}

/// Limit (memory): HTTP/2 frames queued for a socket
#[tokio::test(start_paused = true)]
async fn answers_are_bounded_and_do_not_end_a_batch() {
    let (mut io, mut flusher) = gather(Sink::default());
    // As many acknowledgements as fit, then one write of all of them.
    for _answer in 0..4 {
        frame(&mut io, &PONG);
    }
    assert_eq!(lock(&io.0).inner.taken, PONG.repeat(4));
    frame(&mut io, &[1; 20_000]);
    frame(&mut io, &PONG);
    frame(&mut io, &[2; 20_000]);
    assert_eq!(lock(&io.0).inner.writes, 1);
    assert!(flusher.poll_flush(&mut noop()).is_ready());
    assert_eq!(lock(&io.0).inner.writes, 2);
    assert_eq!(lock(&io.0).inner.taken.len(), 5 * PONG.len() + 40_000);
    // Shutdown writes the last frames as well.
    frame(&mut io, &PONG);
    assert!(Pin::new(&mut io).poll_shutdown(&mut noop()).is_ready());
    assert_eq!(lock(&io.0).inner.taken.len(), 6 * PONG.len() + 40_000);
}

proptest! {
    #[test]
    fn bytes_leave_in_the_order_they_came(
        frames in proptest::collection::vec((prop_oneof![Just(0), 1_usize..60_000], any::<bool>()), 0..12),
        script in proptest::collection::vec(prop_oneof![Just(0), 1_usize..90_000], 0..24),
    ) {
        // Delayed acknowledgements need a timer.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let _entered = runtime.enter();
        let (mut io, mut flusher) = gather(Sink { script, ..Sink::default() });
        let mut expected = Vec::new();
        let mut next = 0_u8;
        for (size, ask) in frames {
            let mut bytes: Vec<u8> = (0..size).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect();
            if size == 0 {
                bytes.extend(PONG);
            }
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let taken = frame(&mut io, rest);
                rest = rest.get(taken..).unwrap_or_default();
            }
            expected.extend(bytes);
            if ask {
                let _later = flusher.poll_flush(&mut noop());
            }
        }
        lock(&io.0).release_answers();
        while flusher.poll_flush(&mut noop()).is_pending() {}
        let state = lock(&io.0);
        prop_assert_eq!(&state.inner.taken, &expected);
        prop_assert!(state.held.is_none());
    }
}
