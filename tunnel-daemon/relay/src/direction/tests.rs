//! Tests of one direction with in-memory source, sink and pools.

mod movers;

use std::{collections::VecDeque, io};

use bytes::Bytes;
use proptest::prelude::*;
use rustix::io::Errno;

use super::{Direction, Io, Step};
use crate::{
    buffers::{LARGE, SMALL},
    config::Thresholds,
    outcome::Op,
};

const PIPE: usize = 1024;

/// Scripted source, sink and pools.
#[derive(Default)]
struct World {
    source: VecDeque<u8>,
    source_ended: bool,
    /// Number of bytes before the urgent byte.
    urgent_after: Option<usize>,
    source_error: Option<Errno>,
    sink: Vec<u8>,
    room: usize,
    sink_error: Option<Errno>,
    finished: u32,
    in_pipe: VecDeque<u8>,
    pipes: usize,
    pipe_denied: bool,
    fill_refused: bool,
    drain_refused: bool,
    drain_stuck: bool,
    reads: u32,
    fills: u32,
    buffers: usize,
    buffer_sizes: Vec<usize>,
    delivered: u64,
}

impl World {
    fn new(source: &[u8]) -> Self {
        Self {
            source: source.to_vec().into(),
            room: usize::MAX,
            ..Self::default()
        }
    }

    fn take_source(&mut self, max: usize) -> io::Result<Vec<u8>> {
        if let Some(error) = self.source_error {
            return Err(error.into());
        }
        if self.source.is_empty() && !self.source_ended {
            return Err(Errno::AGAIN.into());
        }
        let count = max
            .min(self.source.len())
            .min(self.urgent_after.unwrap_or(usize::MAX));
        self.urgent_after = self.urgent_after.map(|after| after - count);
        let rest = self.source.split_off(count);
        Ok(std::mem::replace(&mut self.source, rest).into())
    }

    fn give_sink(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(error) = self.sink_error {
            return Err(error.into());
        }
        if self.room == 0 {
            return Err(Errno::AGAIN.into());
        }
        let count = bytes.len().min(self.room);
        self.room -= count;
        self.sink.extend_from_slice(&bytes[..count]);
        Ok(count)
    }
}

impl Io for World {
    type Pipe = ();

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reads += 1;
        // A read that begins at the urgent byte skips it.
        self.urgent_after.take_if(|after| *after == 0);
        let bytes = self.take_source(into.len())?;
        into[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.give_sink(bytes)
    }

    fn fill(&mut self, (): &()) -> io::Result<usize> {
        self.fills += 1;
        if self.fill_refused {
            return Err(Errno::INVAL.into());
        }
        if self.in_pipe.len() == PIPE {
            return Err(Errno::AGAIN.into());
        }
        if self.urgent_after == Some(0) && !self.source_ended {
            return Err(Errno::AGAIN.into());
        }
        let bytes = self.take_source(PIPE - self.in_pipe.len())?;
        self.in_pipe.extend(&bytes);
        Ok(bytes.len())
    }

    fn drain(&mut self, (): &(), held: usize) -> io::Result<usize> {
        assert_eq!(held, self.in_pipe.len());
        if self.drain_refused {
            return Err(Errno::INVAL.into());
        }
        if self.drain_stuck {
            return Ok(0);
        }
        let bytes: Vec<u8> = self.in_pipe.iter().copied().collect();
        let count = self.give_sink(&bytes)?;
        self.in_pipe.drain(..count);
        Ok(count)
    }

    fn unload(&mut self, (): &(), into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.in_pipe.len());
        for (place, byte) in into.iter_mut().zip(self.in_pipe.drain(..count)) {
            *place = byte;
        }
        Ok(count)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.finished += 1;
        Ok(())
    }

    fn progress(&mut self, delivered: u64) {
        self.delivered = delivered;
    }

    fn capacity((): &()) -> usize {
        PIPE
    }

    fn lend_pipe(&mut self) -> Option<()> {
        self.pipes += usize::from(!self.pipe_denied);
        (!self.pipe_denied).then_some(())
    }

    fn return_pipe(&mut self, (): (), is_empty: bool) {
        assert_eq!(is_empty, self.in_pipe.is_empty());
        self.pipes -= 1;
    }

    fn lend_buffer(&mut self, size: usize) -> Vec<u8> {
        self.buffers += 1;
        self.buffer_sizes.push(size);
        vec![0; size]
    }

    fn return_buffer(&mut self, buffer: Vec<u8>) {
        self.buffers -= usize::from(!buffer.is_empty());
    }
}

fn begin(rules: &Thresholds) -> Direction<()> {
    Direction::new(Bytes::new(), rules)
}

#[test]
fn bytes_handed_over_with_the_pair_come_first() {
    let rules = Thresholds::default();
    let mut world = World::new(b"world");
    let mut direction = Direction::new(Bytes::from_static(b"hello "), &rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
    assert_eq!(world.sink, b"hello world");
    assert_eq!((direction.flow().bytes, world.delivered), (11, 11));
}

#[test]
fn end_of_stream_is_passed_on_once_and_after_the_last_byte() {
    let rules = Thresholds::default();
    let mut world = World::new(b"last words");
    world.source_ended = true;
    world.room = 4;
    let mut direction = begin(&rules);
    direction.source_ready(true);
    assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
    assert_eq!((world.finished, direction.held()), (0, 6));
    world.room = usize::MAX;
    direction.sink_ready();
    assert!(matches!(direction.run(&mut world, &rules), Step::Done));
    assert_eq!(
        (world.finished, world.sink.as_slice()),
        (1, &b"last words"[..])
    );
    assert!(matches!(direction.run(&mut world, &rules), Step::Done));
    assert_eq!(world.finished, 1);
}

#[test]
fn eof_of_an_empty_source_is_passed_on() {
    for rules in [Thresholds::default(), Thresholds::splice_at_once()] {
        let mut world = World::new(b"");
        world.source_ended = true;
        let mut direction = begin(&rules);
        assert!(matches!(direction.run(&mut world, &rules), Step::Done));
        assert_eq!((world.finished, world.buffers, world.pipes), (1, 0, 0));
    }
}

#[test]
fn short_read_saves_a_further_read() {
    let rules = Thresholds::default();
    let mut world = World::new(b"ping");
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
    assert_eq!(world.reads, 1);
}

#[test]
fn short_read_is_not_the_last_after_an_eof_event() {
    let rules = Thresholds::default();
    let mut world = World::new(b"bye");
    world.source_ended = true;
    let mut direction = begin(&rules);
    direction.source_ready(true);
    assert!(matches!(direction.run(&mut world, &rules), Step::Done));
}

/// Until an event reports the end of the source, a paused direction has none, whatever its reads return.
#[test]
fn eof_is_known_while_earlier_bytes_wait_for_the_sink() {
    for rules in [Thresholds::copy_only(), Thresholds::splice_at_once()] {
        let mut world = World::new(b"last words");
        world.room = 0;
        let mut direction = begin(&rules);
        direction.read_by_record();
        assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
        assert!(!direction.source_has_ended());
        world.source_ended = true;
        direction.source_ready(true);
        assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
        assert!(direction.source_has_ended());
        assert_eq!((world.finished, direction.held()), (0, 10));
        world.room = usize::MAX;
        direction.sink_ready();
        assert!(matches!(direction.run(&mut world, &rules), Step::Done));
        assert!(direction.source_has_ended());
    }
}

#[test]
fn short_read_of_a_record_is_followed_by_another_read() {
    let rules = Thresholds::copy_only();
    let mut world = World::new(b"a record");
    let mut direction = begin(&rules);
    direction.read_by_record();
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
    assert_eq!(world.reads, 2);
}

/// This holds even if the urgent event arrives after the splice that stopped at the urgent byte.
#[test]
fn bytes_behind_an_urgent_byte_are_moved_before_eof() {
    for rules in [Thresholds::copy_only(), Thresholds::splice_at_once()] {
        for ended in [false, true] {
            for told_first in [false, true] {
                let mut world = World::new(b"before and behind");
                (world.source_ended, world.urgent_after) = (ended, Some(6));
                let mut direction = begin(&rules);
                if !told_first {
                    direction.run(&mut world, &rules);
                }
                direction.source_ready(ended);
                direction.source_is_urgent();
                direction.run(&mut world, &rules);
                assert_eq!(world.sink, b"before and behind");
                assert_eq!(world.finished, u32::from(ended));
            }
        }
    }
}

/// io_uring does not report urgent data; the next event reveals it.
#[test]
fn splice_continues_behind_an_unreported_urgent_byte() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(b"before and behind");
    world.urgent_after = Some(6);
    let mut direction = begin(&rules);
    direction.run(&mut world, &rules);
    assert_eq!(world.sink, b"before");
    direction.source_ready(false);
    direction.source_may_be_urgent();
    direction.run(&mut world, &rules);
    assert_eq!(world.sink, b"before and behind");
    assert_eq!(direction.flow().spliced_bytes, 16);
}

#[test]
fn full_sink_is_not_tried_again_before_it_has_room() {
    let rules = Thresholds::default();
    let mut world = World::new(b"abc");
    world.room = 0;
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
    world.room = 9;
    assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
    assert_eq!((world.sink.len(), direction.held()), (0, 3));
    direction.sink_ready();
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
}

#[test]
fn idle_direction_keeps_neither_buffer_nor_pipe() {
    for rules in [Thresholds::default(), Thresholds::splice_at_once()] {
        let mut world = World::new(&[7; 5000]);
        let mut direction = begin(&rules);
        assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
        assert_eq!((world.buffers, world.pipes, world.sink.len()), (0, 0, 5000));
    }
}

#[test]
fn buffer_grows_with_full_reads_only() {
    let rules = Thresholds::copy_only();
    let mut world = World::new(&vec![1; SMALL * 32]);
    let mut direction = begin(&rules);
    direction.run(&mut world, &rules);
    assert_eq!(world.buffer_sizes, [SMALL, SMALL * 4, LARGE]);
    let mut small = World::new(&vec![1; SMALL - 1]);
    let mut direction = begin(&rules);
    direction.run(&mut small, &rules);
    assert_eq!(small.buffer_sizes, [SMALL]);
}

#[test]
fn failure_names_the_end_that_failed() {
    for rules in [Thresholds::copy_only(), Thresholds::splice_at_once()] {
        let mut world = World::new(b"x");
        world.source_error = Some(Errno::CONNRESET);
        let step = begin(&rules).run(&mut world, &rules);
        assert!(matches!(step, Step::Failed(Op::Read, _)));
        let mut world = World::new(b"x");
        world.sink_error = Some(Errno::PIPE);
        let step = begin(&rules).run(&mut world, &rules);
        assert!(matches!(step, Step::Failed(Op::Write, _)));
    }
}

#[test]
fn direction_yields_after_its_share_of_bytes_or_reads() {
    let rules = Thresholds {
        turn_bytes: 3000,
        ..Thresholds::splice_at_once()
    };
    let mut world = World::new(&[1; 10_000]);
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Again));
    assert_eq!(world.sink.len(), 3 * PIPE);
    let rules = Thresholds {
        turn_reads: 2,
        ..Thresholds::copy_only()
    };
    let mut world = World::new(&vec![1; SMALL * 9]);
    assert!(matches!(begin(&rules).run(&mut world, &rules), Step::Again));
    assert_eq!(world.reads, 2);
}

#[test]
fn release_returns_buffers_and_pipes_of_a_failed_pair() {
    for rules in [Thresholds::copy_only(), Thresholds::splice_at_once()] {
        let mut world = World::new(&[1; 100]);
        world.room = 10;
        let mut direction = begin(&rules);
        direction.run(&mut world, &rules);
        assert_eq!(world.buffers + world.pipes, 1);
        direction.release(&mut world);
        assert_eq!(world.buffers + world.pipes, 0);
    }
}

/// Miri is some hundred times slower.
const CASES: u32 = if cfg!(miri) { 4 } else { 256 };

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]
    #[test]
    fn any_order_of_events_delivers_each_byte_once_and_in_order(
        first in proptest::collection::vec(any::<u8>(), 0..40),
        events in proptest::collection::vec((0..3000_usize, 0..3000_usize, 0..24_u8), 1..60),
        splice in any::<bool>(),
    ) {
        let rules = Thresholds {
            splice_after_bytes: 2000,
            splice_wake_bytes: 100,
            chatty_wake_bytes: 60,
            turn_bytes: 2500,
            splice,
            ..Thresholds::default()
        };
        let mut world = World::new(b"");
        world.room = 0;
        let mut expected = first.clone();
        let mut direction = Direction::new(Bytes::from(first), &rules);
        let mut next = 0_u8;
        for (arrives, room, chance) in events {
            for _ in 0..arrives {
                next = next.wrapping_mul(31).wrapping_add(7);
                world.source.push_back(next);
                expected.push(next);
            }
            world.room += room;
            world.fill_refused |= chance == 1;
            world.drain_refused |= chance == 2;
            world.pipe_denied = chance == 3;
            direction.source_ready(false);
            direction.sink_ready();
            let step = direction.run(&mut world, &rules);
            prop_assert!(!matches!(step, Step::Failed(..) | Step::Done), "{step:?}");
            prop_assert!(expected.starts_with(&world.sink));
        }
        world.source_ended = true;
        world.room = usize::MAX;
        direction.source_ready(true);
        direction.sink_ready();
        while matches!(direction.run(&mut world, &rules), Step::Again) {}
        prop_assert_eq!(&world.sink, &expected);
        prop_assert_eq!(direction.flow().bytes, expected.len() as u64);
        prop_assert_eq!((world.finished, world.buffers, world.pipes), (1, 0, 0));
    }
}
