//! Tests of the choice between splice and copy, and of the content of pipes.

use super::{PIPE, World, begin};
use crate::{config::Thresholds, direction::Step, outcome::Op};

#[test]
fn bulk_is_spliced_after_the_threshold_and_not_before() {
    let rules = Thresholds {
        turn_reads: 1,
        ..Thresholds::default()
    };
    let mut world = World::new(&vec![1; 2 << 20]);
    let mut direction = begin(&rules);
    while matches!(direction.run(&mut world, &rules), Step::Again) {
        assert!(world.fills == 0 || direction.flow().bytes > rules.splice_after_bytes);
    }
    assert!(direction.flow().movers.splice && direction.flow().movers.copy);
    assert_eq!(world.sink.len(), 2 << 20);
}

#[test]
fn chatty_direction_is_copied_again_and_for_good() {
    let rules = Thresholds {
        chatty_wake_bytes: 4096,
        ..Thresholds::splice_at_once()
    };
    let mut world = World::new(b"");
    let mut direction = begin(&rules);
    for _ in 0..9 {
        world.source.extend([1; 64]);
        direction.source_ready(false);
        direction.run(&mut world, &rules);
    }
    let fills = world.fills;
    world.source.extend(vec![1; 1 << 20]);
    direction.source_ready(false);
    direction.run(&mut world, &rules);
    assert_eq!(world.fills, fills);
    assert_eq!(direction.flow().spliced_bytes, 8 * 64);
}

#[test]
fn direction_without_a_pipe_is_copied_for_good() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(b"some");
    world.pipe_denied = true;
    let mut direction = begin(&rules);
    direction.run(&mut world, &rules);
    world.pipe_denied = false;
    world.source.extend(b" more");
    direction.source_ready(false);
    direction.run(&mut world, &rules);
    assert_eq!((world.sink.as_slice(), world.fills), (&b"some more"[..], 0));
}

#[test]
fn source_that_cannot_be_spliced_is_copied() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(b"bytes");
    world.fill_refused = true;
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
    assert_eq!((world.sink.as_slice(), world.pipes), (&b"bytes"[..], 0));
}

#[test]
fn pipe_that_cannot_be_spliced_out_is_read_out() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(&[5; 300]);
    world.drain_refused = true;
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Idle));
    assert_eq!((world.sink.as_slice(), world.pipes), (&[5; 300][..], 0));
}

#[test]
fn drain_that_takes_nothing_from_a_full_pipe_fails_the_pair() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(b"stuck");
    world.drain_stuck = true;
    let mut direction = begin(&rules);
    assert!(matches!(
        direction.run(&mut world, &rules),
        Step::Failed(Op::Write, _)
    ));
}

#[test]
fn blocked_pipe_takes_more_only_up_to_half() {
    let rules = Thresholds::splice_at_once();
    let mut world = World::new(&[1; 100]);
    world.room = 50;
    let mut direction = begin(&rules);
    assert!(matches!(direction.run(&mut world, &rules), Step::Blocked));
    assert_eq!(direction.held(), 50);
    world.source.extend([1; 5000]);
    direction.source_ready(false);
    direction.run(&mut world, &rules);
    assert_eq!(direction.held(), PIPE);
    let fills = world.fills;
    direction.run(&mut world, &rules);
    assert_eq!((direction.held(), world.fills), (PIPE, fills));
}
