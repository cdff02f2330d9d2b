//! Tests of handshake slots with scripted connections, on paused time.

use super::*;
use futures_util::FutureExt as _;
use std::{
    future::{pending, ready},
    pin::Pin,
};

const DEADLINE: Duration = Duration::from_secs(10);
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// A connection whose peer has sent its first byte; yields its place once it has a slot.
type Speaker = Pin<Box<dyn Future<Output = Result<Place, SlotError>>>>;

fn bounded(handshakes_max: usize, silent_max: usize, waiting_max: usize) -> Arc<Handshakes> {
    Handshakes::new(HandshakeLimits {
        handshakes_max,
        silent_max,
        waiting_max,
        answers_within: ANSWERS_WITHIN,
    })
}

fn at(last: u8) -> PeerAddr {
    PeerAddr::Tcp(([10, 0, 0, last], 1000).into())
}

/// Joins the queue at its first poll.
fn speaker(handshakes: &Arc<Handshakes>, last: u8) -> Speaker {
    let mut place = handshakes.enter(at(last));
    let until = Instant::now() + DEADLINE;
    Box::pin(async move { place.acquire_slot(ready(true), until).await.map(|()| place) })
}

/// Connections from one address.
fn speakers(handshakes: &Arc<Handshakes>, last: u8, count: usize) -> Vec<Speaker> {
    (0..count).map(|_| speaker(handshakes, last)).collect()
}

/// Polls each; connections with a slot leave the list.
fn called(speakers: &mut Vec<Speaker>) -> Vec<Place> {
    let mut places = Vec::new();
    speakers.retain_mut(|speaker| match speaker.as_mut().now_or_never() {
        Some(slot) => {
            places.push(slot.unwrap());
            false
        }
        None => true,
    });
    places
}

/// A handshake that waits for its peer; yields the connection's number once its slot is taken away.
type Stalled = Pin<Box<dyn Future<Output = u64>>>;

fn stalls(place: Place) -> Stalled {
    Box::pin(async move {
        assert_eq!(place.taken_back().await, SlotError::Stalled);
        place.number
    })
}

/// Polls each; returns the numbers of handshakes that have lost their slots, and removes these from the list.
fn ended(stalled: &mut Vec<Stalled>) -> Vec<u64> {
    let mut numbers = Vec::new();
    stalled.retain_mut(|stalls| {
        let number = stalls.as_mut().now_or_never();
        numbers.extend(number);
        number.is_none()
    });
    numbers
}

fn assert_empty(handshakes: &Handshakes) {
    let lines = handshakes.lock();
    assert!(lines.silent.is_empty() && lines.sources.is_empty());
    assert_eq!((lines.waiting, lines.holding), (0, 0));
}

/// Limit (peers): TLS connections before their handshake
#[tokio::test(start_paused = true)]
async fn at_the_limit_the_oldest_silent_connection_is_closed() {
    let handshakes = bounded(1, 3, 9);
    let until = Instant::now() + DEADLINE;
    let mut places: Vec<Place> = (0..5).map(|_| handshakes.enter(at(1))).collect();
    let mut ends = Vec::new();
    for place in &mut places {
        ends.push(place.acquire_slot(pending(), until).now_or_never());
    }
    let crowded: Option<Result<(), SlotError>> = Some(Err(SlotError::CrowdedOut));
    assert_eq!(ends, [crowded, crowded, None, None, None]);
    // The first byte came too late for this connection, and in time for the next one.
    let slot = places[1].acquire_slot(ready(true), until).await;
    assert_eq!(slot, Err(SlotError::CrowdedOut));
    assert_eq!(places[2].acquire_slot(ready(true), until).await, Ok(()));
    let closed = handshakes.close_oldest_silent();
    assert!(!closed, "it may be about to speak");
    tokio::time::advance(SPEAKS_WITHIN).await;
    assert!(handshakes.close_oldest_silent());
    let ends = [3, 4].map(|n| places[n].acquire_slot(pending(), until).now_or_never());
    assert_eq!(ends, [crowded, None]);
    let slot = places[4].acquire_slot(pending(), until).await;
    assert_eq!(slot, Err(SlotError::Silent));
    assert_eq!(Instant::now(), until);
    places.clear();
    assert!(!handshakes.close_oldest_silent());
    assert_empty(&handshakes);
}

/// Limit (times): TLS handshake, with the wait for the first byte and a slot
#[tokio::test(start_paused = true)]
async fn one_deadline_covers_the_first_byte_and_the_slot() {
    let handshakes = bounded(1, 9, 9);
    let until = Instant::now() + DEADLINE;
    let _slow = speaker(&handshakes, 1).await.unwrap();
    let mut late = handshakes.enter(at(2));
    let first_byte = tokio::time::sleep(DEADLINE / 2).map(|()| true);
    let slot = late.acquire_slot(first_byte, until).await;
    assert_eq!(slot, Err(SlotError::NoSlot));
    assert_eq!(Instant::now(), until);
    let mut gone = handshakes.enter(at(3));
    let slot = gone.acquire_slot(ready(false), until).await;
    assert_eq!(slot, Err(SlotError::Closed));
}

/// Limit (peers): TLS handshakes at once on a listener
#[tokio::test(start_paused = true)]
async fn one_address_has_half_of_the_slots_and_its_others_wait_in_order() {
    let handshakes = bounded(4, 9, 9);
    let mut fleet = speakers(&handshakes, 1, 4);
    let mut held = called(&mut fleet);
    assert_eq!((held.len(), fleet.len()), (2, 2));
    let other = called(&mut speakers(&handshakes, 2, 1));
    assert_eq!(other.len(), 1, "half is left for others");
    for round in 2..4 {
        held.remove(0);
        held.extend(called(&mut fleet));
        let numbers: Vec<u64> = held.iter().map(|place| place.number).collect();
        assert_eq!(numbers, [round - 1, round], "in the order of arrival");
    }
    drop((held, other));
    assert_empty(&handshakes);
}

#[tokio::test(start_paused = true)]
async fn a_free_slot_goes_to_the_address_that_holds_fewest() {
    let handshakes = bounded(4, 9, 9);
    let (mut one, mut two) = (speakers(&handshakes, 1, 4), speakers(&handshakes, 2, 4));
    let (mut of_one, of_two) = (called(&mut one), called(&mut two));
    assert_eq!((of_one.len(), of_two.len()), (2, 2));
    let mut last = speakers(&handshakes, 3, 1);
    assert!(called(&mut last).is_empty(), "all slots are taken");
    of_one.pop();
    assert!(called(&mut one).is_empty() && called(&mut two).is_empty());
    assert_eq!(called(&mut last).len(), 1, "ahead of four that came before");
    assert_eq!(called(&mut one).len(), 1);
}

/// Limit (times): A stalled TLS handshake while others wait for a slot
#[tokio::test(start_paused = true)]
async fn stalled_handshakes_of_several_addresses_make_room_for_others_one_by_one() {
    let handshakes = bounded(4, 9, 9);
    let mut stalled = Vec::new();
    for last in [1, 2] {
        let held = called(&mut speakers(&handshakes, last, 2));
        stalled.extend(held.into_iter().map(stalls));
    }
    let mut other = speakers(&handshakes, 3, 1);
    assert!(ended(&mut stalled).is_empty() && called(&mut other).is_empty());
    tokio::time::advance(ANSWERS_WITHIN - Duration::from_millis(1)).await;
    assert!(ended(&mut stalled).is_empty() && called(&mut other).is_empty());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(ended(&mut stalled), [0], "one for the one that waits");
    let mut held = called(&mut other);
    assert_eq!(held.len(), 1);
    // Later connections need not wait.
    other = speakers(&handshakes, 3, 1);
    held.extend(called(&mut other));
    assert_eq!(held.len(), 2);
    assert_eq!(ended(&mut stalled), [2], "of the address with most");
    // The third address holds half of the slots, and the others hold fewer.
    other = speakers(&handshakes, 3, 1);
    assert!(called(&mut other).is_empty() && ended(&mut stalled).is_empty());
    drop((stalled, held));
    assert_eq!(called(&mut other).len(), 1);
    assert_empty(&handshakes);
}

/// Limit (times): A stalled TLS handshake while others wait for a slot
#[tokio::test(start_paused = true)]
async fn a_stalled_handshake_is_ended_only_for_a_waiter_that_can_use_its_slot() {
    let handshakes = bounded(4, 9, 9);
    let mut fleet = speakers(&handshakes, 1, 3);
    let mut of_fleet = called(&mut fleet);
    let of_other = called(&mut speakers(&handshakes, 2, 1));
    assert_eq!((of_fleet.len(), of_other.len()), (2, 1));
    let mut stalled: Vec<_> = of_other.into_iter().map(stalls).collect();
    assert!(ended(&mut stalled).is_empty());
    tokio::time::advance(ANSWERS_WITHIN).await;
    // The first address holds half of the slots, so it could not use this slot.
    assert!(ended(&mut stalled).is_empty() && called(&mut fleet).is_empty());
    stalled.push(stalls(of_fleet.remove(0)));
    assert!(ended(&mut stalled).is_empty());
    tokio::time::advance(ANSWERS_WITHIN).await;
    assert_eq!(ended(&mut stalled), [0]);
    of_fleet.extend(called(&mut fleet));
    assert_eq!(of_fleet.len(), 2);
    stalled.push(stalls(of_fleet.remove(0)));
    assert!(ended(&mut stalled).is_empty());
    tokio::time::advance(ANSWERS_WITHIN).await;
    assert!(ended(&mut stalled).is_empty(), "nobody waits");
    drop((stalled, of_fleet));
    assert_empty(&handshakes);
}

/// Limit (peers): TLS connections before their handshake
#[tokio::test(start_paused = true)]
async fn the_last_waiter_of_the_busiest_address_is_closed_at_the_limit() {
    let handshakes = bounded(4, 9, 2);
    let mut crowd = speakers(&handshakes, 1, 4);
    let mut held = called(&mut crowd);
    assert_eq!((held.len(), crowd.len()), (2, 2));
    // A third waiter makes the line long: its oldest connection would be served last.
    let mut third = speaker(&handshakes, 1);
    assert!(third.as_mut().now_or_never().is_none());
    let oldest = crowd.remove(0).await;
    assert_eq!(oldest.err(), Some(SlotError::TooMany));
    crowd.push(third);
    held.extend(called(&mut speakers(&handshakes, 2, 2)));
    assert_eq!(held.len(), 4, "the other half");
    let mut late = speakers(&handshakes, 3, 1);
    assert!(called(&mut late).is_empty());
    let newest = crowd.pop().unwrap().await;
    assert_eq!(newest.err(), Some(SlotError::TooMany));
    held.pop();
    assert_eq!(called(&mut late).len(), 1);
    assert!(called(&mut crowd).is_empty(), "the oldest still waits");
}

/// A flood that stalls: each of its handshakes holds its slot until it is taken back.
///
/// Limit (times): A new agent behind stalled TLS handshakes of its own address | gets a slot within 2 s
#[tokio::test(start_paused = true)]
async fn a_new_agent_does_not_wait_behind_a_flood_of_its_address() {
    const FLOOD: usize = 600;
    let handshakes = bounded(256, 1024, 4096);
    let mut flood = speakers(&handshakes, 1, FLOOD);
    let mut stalled: Vec<Stalled> = called(&mut flood).into_iter().map(stalls).collect();
    assert_eq!((stalled.len(), flood.len()), (128, FLOOD - 128));
    assert!(ended(&mut stalled).is_empty(), "they wait for their peers");
    let began = Instant::now();
    let mut agent = speakers(&handshakes, 1, 1);
    assert!(called(&mut agent).is_empty(), "its address has no slot");
    while called(&mut agent).is_empty() {
        assert!(began.elapsed() < 2 * ANSWERS_WITHIN, "behind the flood");
        tokio::time::advance(ANSWERS_WITHIN / 20).await;
        ended(&mut stalled);
        stalled.extend(called(&mut flood).into_iter().map(stalls));
        ended(&mut stalled);
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_waiter_among_equally_busy_addresses_is_closed() {
    let handshakes = bounded(1, 9, 8);
    let _held = speaker(&handshakes, 0).await.unwrap();
    let mut early: Vec<Speaker> = (1..9).map(|last| speaker(&handshakes, last)).collect();
    assert!(called(&mut early).is_empty());
    for last in 9..40 {
        let late = speaker(&handshakes, last).now_or_never();
        let late = late.map(Result::err);
        assert_eq!(late, Some(Some(SlotError::TooMany)));
        assert!(called(&mut early).is_empty(), "they wait");
    }
}

#[tokio::test(start_paused = true)]
async fn disconnected_waiters_release_their_places() {
    let handshakes = bounded(1, 9, 9);
    let silent = handshakes.enter(at(1));
    let mut waiting = speakers(&handshakes, 1, 3);
    let mut held = called(&mut waiting);
    assert_eq!((held.len(), waiting.len()), (1, 2));
    // Disconnected while it waits.
    waiting.pop();
    // Got its slot, and disconnected before it noticed.
    held.clear();
    assert_eq!(handshakes.lock().holding, 1);
    waiting.clear();
    assert_eq!(handshakes.lock().holding, 0);
    assert_eq!(called(&mut speakers(&handshakes, 1, 1)).len(), 1);
    drop(silent);
    assert_empty(&handshakes);
}

#[test]
fn addresses_of_one_ipv6_network_are_one_source() {
    let source = |ip: &str| host_of(PeerAddr::Tcp((ip.parse::<IpAddr>().unwrap(), 1).into()));
    assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:2"));
    assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
}
