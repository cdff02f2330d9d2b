//! Tests of both ends with random steps and random delays.

use proptest::prelude::*;

use super::*;

/// One step of a simulated lane; the numbers choose the end.
#[derive(Clone, Debug)]
enum Step {
    Open(usize),
    Accept(usize),
    Refuse(usize),
    Send(usize, usize),
    Fin(usize),
    Close(usize),
    Reset(usize),
    Ping(usize),
    Write(usize, usize),
    Read(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let end = 0..2_usize;
    prop_oneof![
        3 => end.clone().prop_map(Step::Open),
        4 => end.clone().prop_map(Step::Accept),
        1 => end.clone().prop_map(Step::Refuse),
        4 => (end.clone(), 1..5000_usize).prop_map(|(at, bytes)| Step::Send(at, bytes)),
        2 => end.clone().prop_map(Step::Fin),
        1 => end.clone().prop_map(Step::Close),
        1 => end.clone().prop_map(Step::Reset),
        1 => end.clone().prop_map(Step::Ping),
        8 => (end.clone(), 1..4_usize).prop_map(|(at, frames)| Step::Write(at, frames)),
        8 => (end, 1..6000_usize).prop_map(|(at, bytes)| Step::Read(at, bytes)),
    ]
}

/// What both ends of one tunnel sent and received, compared once the lane is idle.
#[derive(Default)]
struct Books {
    sent: [Vec<u8>; 2],
    heard: [Vec<u8>; 2],
    /// Per sender: all its bytes must arrive, because it finished and neither end reset the tunnel.
    complete: [bool; 2],
    cut: bool,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// For any steps and delays, no end sees a violation, and bytes arrive in order. A tunnel that ended cleanly delivers
    /// all its bytes. After all frames have arrived, the lane is clean.
    #[test]
    fn conforming_ends_see_no_violation_and_lose_no_byte(steps in proptest::collection::vec(step(), 0..200)) {
        let mut pair = Pair::new();
        // Keyed by sequence, since one end may be a tunnel ahead.
        let mut books: std::collections::HashMap<u16, Books> = std::collections::HashMap::new();
        let mut next = 0_u8;
        let mut finish = Vec::new();
        for at in [0, 1, 0, 1, 0, 1, 0, 1] {
            finish.extend([Step::Write(at, usize::MAX), Step::Read(1 - at, usize::MAX)]);
        }
        let mut reset_all = finish.clone();
        reset_all.extend([Step::Reset(0), Step::Reset(1)]);
        reset_all.extend(finish);
        for step in steps.into_iter().chain(reset_all) {
            let mut touched = 0;
            match step {
                Step::Open(at) => {
                    touched = at;
                    let _busy = pair.ends[at].open(&request(), 0);
                }
                Step::Accept(at) => { touched = at; pair.ends[at].accept(); }
                Step::Refuse(at) => { touched = at; pair.ends[at].refuse(RefusalCode::Failed, "no"); }
                Step::Send(at, bytes) => {
                    if pair.ends[at].is_sending() {
                        let payload: Vec<u8> = (0..bytes).map(|_| { next = next.wrapping_add(1); next }).collect();
                        let book = books.entry(pair.ends[at].sequence()).or_default();
                        book.sent[at].extend_from_slice(&payload);
                        pair.ends[at].send(payload.into());
                    }
                }
                Step::Fin(at) | Step::Close(at) => {
                    touched = at;
                    let end = &mut pair.ends[at];
                    let book = books.entry(end.sequence()).or_default();
                    book.complete[at] |= end.is_sending();
                    if matches!(step, Step::Fin(_)) {
                        end.fin();
                    } else {
                        // Frames from the other end are ignored from here on.
                        book.cut |= !end.is_idle();
                        end.close("");
                    }
                }
                Step::Reset(at) => {
                    touched = at;
                    let end = &mut pair.ends[at];
                    if !end.is_idle() {
                        books.entry(end.sequence()).or_default().cut = true;
                    }
                    end.reset("");
                }
                Step::Ping(at) => pair.ends[at].ping(1),
                Step::Write(at, frames) => pair.write(at, frames),
                Step::Read(at, bytes) => {
                    touched = at;
                    pair.read(at, bytes).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
                }
            }
            let sequence = pair.ends[touched].sequence();
            for event in pair.take(touched) {
                match event {
                    LaneEvent::Data(bytes) => {
                        // Data belongs to the current tunnel or, if a new OPEN followed at once, to the previous tunnel.
                        let of = [sequence, sequence.wrapping_sub(1)].into_iter().find(|sequence| {
                            books.get(sequence).is_some_and(|book| {
                                let heard = book.heard[touched].len();
                                book.sent[1 - touched].get(heard..heard + bytes.len()) == Some(&bytes[..])
                            })
                        });
                        prop_assert!(of.is_some(), "bytes that nobody sent");
                        let book = books.entry(of.unwrap()).or_default();
                        book.heard[touched].extend_from_slice(&bytes);
                    }
                    LaneEvent::PeerReset { .. } => { books.entry(sequence).or_default().cut = true; }
                    _ => (),
                }
            }
        }
        prop_assert!(pair.ends[0].is_idle(), "server: {:?}", pair.ends[0]);
        prop_assert!(pair.ends[1].is_idle(), "agent: {:?}", pair.ends[1]);
        prop_assert!(pair.readers.iter().all(FrameReader::is_at_boundary));
        for (sequence, book) in &books {
            for at in [0, 1] {
                if book.complete[at] && !book.cut {
                    prop_assert_eq!(&book.heard[1 - at], &book.sent[at], "tunnel {}", sequence);
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_give_the_same_events_at_any_split(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzz::fuzz_entry(&input);
    }

    #[test]
    fn plausible_frames_never_panic_in_any_order(
        choice in any::<u8>(),
        frames in proptest::collection::vec((1..12_u8, any::<u8>(), 0..4_u16, proptest::collection::vec(any::<u8>(), 0..20)), 0..30),
    ) {
        let mut input = vec![choice];
        for (kind, flags, sequence, payload) in frames {
            input.extend([kind, flags]);
            input.extend(sequence.to_be_bytes());
            input.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
            input.extend(payload);
        }
        fuzz::fuzz_entry(&input);
    }
}
