//! How an end handles the events of its machine.

use std::time::Duration;

use adit_core::lane::{LaneEvent, LaneRole, OpenRequest, RefusalCode};

use super::{End, Stage, Verdict};
use crate::lanes::books::{Outcome, Seen, Turn};
use crate::record::Who;

impl End {
    pub(super) fn take(&mut self, event: LaneEvent, turn: &mut Turn) {
        match event {
            LaneEvent::Pong(number) => {
                turn.coverage.note(Seen::Pong);
                self.ping.take_if(|asked| *asked == number);
            }
            LaneEvent::Want(_) => {
                turn.coverage.note(Seen::Wanted);
                turn.wanted = true;
            }
            LaneEvent::Draining => (),
            LaneEvent::Open(request) => self.asked(&request, turn),
            LaneEvent::Opened => self.opened(turn),
            LaneEvent::Failed { code, text } => self.refused(code, &text, turn),
            LaneEvent::Data(bytes) => match &mut self.stage {
                Stage::Tunnel(endpoint) => endpoint.deliver(&bytes, turn),
                stage => panic!("bytes for nobody: {stage:?}"),
            },
            LaneEvent::PeerFin => match &mut self.stage {
                Stage::Tunnel(endpoint) => endpoint.told(turn),
                stage => panic!("a FIN for nobody: {stage:?}"),
            },
            LaneEvent::PeerClosed { text } => match &mut self.stage {
                Stage::Tunnel(endpoint) => {
                    assert_eq!(text, "done");
                    endpoint.told(turn);
                    let uid = endpoint.uid;
                    self.let_go(uid, turn);
                }
                stage => panic!("a close for nobody: {stage:?}"),
            },
            LaneEvent::PeerReset { .. } => self.peer_reset(turn),
            LaneEvent::Idle => self.over(turn),
        }
    }

    fn asked(&mut self, request: &OpenRequest, turn: &mut Turn) {
        let waits = matches!(self.stage, Stage::Idle);
        assert!(waits, "asked out of turn: {self:?}");
        let uid: usize = request.address.parse().unwrap();
        let record = &mut turn.records[uid];
        record.asked += 1;
        assert_eq!(record.raw, request.raw);
        assert_eq!(record.by_agent, self.role == LaneRole::Server);
        let (mut verdict, mut ends_at) = (Verdict::Accept, Some(turn.now));
        if !turn.tame {
            verdict = turn.rng.pick(&[
                Verdict::Accept,
                Verdict::Accept,
                Verdict::Accept,
                Verdict::Accept,
                Verdict::Accept,
                Verdict::AcceptFramed,
                Verdict::AcceptFramed,
                Verdict::Refuse,
                Verdict::Refuse,
                Verdict::Reset,
            ]);
            let takes = turn.rng.pick(&[0, 0, 5, 300, 4_000]);
            let dialled = turn.now.after(Duration::from_millis(takes));
            ends_at = (!turn.rng.once_in(12)).then_some(dialled);
        }
        self.stage = Stage::Answering {
            uid,
            verdict,
            ends_at,
        };
    }

    fn opened(&mut self, turn: &mut Turn) {
        let Stage::Opening { uid, .. } = self.stage else {
            panic!("opened for nobody: {self:?}");
        };
        turn.records[uid].conclude(Outcome::Opened);
        if turn.records[uid].raw && !self.machine.is_raw() {
            turn.coverage.note(Seen::PipeWithFrames);
        }
        self.begin(uid, Who::Client, turn);
    }

    fn refused(&mut self, code: RefusalCode, text: &str, turn: &mut Turn) {
        let Stage::Opening { uid, .. } = self.stage else {
            panic!("refused for nobody: {self:?}");
        };
        let (outcome, seen) = if code == RefusalCode::Busy {
            assert_eq!(self.role, LaneRole::Agent, "the server's OPEN stands");
            (Outcome::Yielded, Seen::Yielded)
        } else {
            assert_eq!((code, text), (RefusalCode::Refused, "no"));
            (Outcome::Refused, Seen::Refused)
        };
        turn.records[uid].conclude(outcome);
        turn.coverage.note(seen);
        self.let_go(uid, turn);
    }

    fn peer_reset(&mut self, turn: &mut Turn) {
        turn.coverage.note(Seen::ResetByPeer);
        let uid = match &self.stage {
            Stage::Opening { uid, .. } => {
                let outcome = if self.machine.has_crossed() {
                    turn.coverage.note(Seen::Unheard);
                    Outcome::Unheard
                } else {
                    Outcome::Refused
                };
                turn.records[*uid].conclude(outcome);
                *uid
            }
            Stage::Answering { uid, .. } => *uid,
            Stage::Tunnel(endpoint) => endpoint.uid,
            stage => panic!("a reset for nobody: {stage:?}"),
        };
        turn.records[uid].cut = true;
        self.let_go(uid, turn);
    }

    /// The machine has finished the tunnel, and the lane is clean.
    fn over(&mut self, turn: &mut Turn) {
        match &self.stage {
            Stage::Tunnel(endpoint) => {
                let uid = endpoint.uid;
                self.let_go(uid, turn);
            }
            // The peer has already opened the next tunnel.
            Stage::Settling { .. } if !self.machine.is_idle() => self.stage = Stage::Idle,
            Stage::Settling { .. } | Stage::Idle => (),
            stage => panic!("over for nobody: {stage:?}"),
        }
    }
}
