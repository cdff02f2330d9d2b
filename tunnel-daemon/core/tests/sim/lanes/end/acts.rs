//! Actions that an end starts by itself in its turn.

use std::time::Duration;

use adit_core::lane::{LaneRole, RefusalCode};
use adit_core::session::Moment;

use super::{End, QUEUE_BYTES_MAX, QUEUE_FRAMES_MAX, Stage, Verdict, Wires};
use crate::lanes::books::{Outcome, Seen, Turn};
use crate::lanes::endpoint::Wish;
use crate::record::Who;

/// Time within which a RESET must be answered.
const RESET_ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Bytes before the end of a tunnel may be unacknowledged this long without progress.
const LINGERS_FOR: Duration = Duration::from_secs(30);
/// Acknowledged bytes may wait this long for the peer to read them.
const TAKEN_WITHIN: Duration = Duration::from_secs(300);

impl End {
    pub(super) fn act(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        // An end that does not read still watches for errors.
        if wires.incoming.is_reset() && !self.wants_input(turn.now) {
            return self.lost(turn, wires);
        }
        match &self.stage {
            // The agent no longer needs the lane.
            Stage::Idle if self.role == LaneRole::Server && self.is_drained() => {
                turn.coverage.note(Seen::Drained);
                self.close(turn, wires);
            }
            Stage::Idle => (),
            Stage::Opening { .. } => self.act_opening(turn, wires),
            Stage::Answering { .. } => self.act_answering(turn),
            Stage::Tunnel(_) => self.act_tunnel(turn),
            Stage::Pipe { .. } => self.act_pipe(turn, wires),
            Stage::Settling { .. } => self.act_settling(turn, wires),
        }
    }

    fn is_drained(&self) -> bool {
        self.machine.is_idle() && !self.machine.can_open()
    }

    fn act_opening(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        let Stage::Opening {
            uid,
            judged_at,
            gives_up_at,
        } = &mut self.stage
        else {
            return;
        };
        let uid = *uid;
        if turn.now >= *gives_up_at {
            return self.give_up(uid, turn, wires);
        }
        if judged_at.is_none_or(|at| turn.now < at) {
            return;
        }
        *judged_at = None;
        if self.unacknowledged(wires) > 0 {
            turn.coverage.note(Seen::Unacknowledged);
            turn.records[uid].conclude(Outcome::Lost);
            turn.records[uid].cut = true;
            self.reset_connection(turn, wires);
        }
    }

    fn give_up(&mut self, uid: usize, turn: &mut Turn, wires: &mut Wires<'_>) {
        self.machine.reset("the client gave up");
        let record = &mut turn.records[uid];
        record.conclude(Outcome::GaveUp);
        record.cut = true;
        record.never_left = self.machine.is_idle();
        let never_left = record.never_left;
        if self.machine.is_raw() {
            // The peer may read any frame as bytes for the target.
            turn.coverage.note(Seen::PipeGivenUp);
            return self.reset_connection(turn, wires);
        }
        turn.coverage.note(if never_left {
            Seen::TakenBack
        } else {
            Seen::GivenUp
        });
        self.let_go(uid, turn);
    }

    fn act_answering(&mut self, turn: &mut Turn) {
        let Stage::Answering {
            uid,
            verdict,
            ends_at,
        } = self.stage
        else {
            return;
        };
        if ends_at.is_none_or(|at| turn.now < at) {
            return;
        }
        turn.moved = true;
        let record = &mut turn.records[uid];
        match verdict {
            Verdict::Accept | Verdict::AcceptFramed => {
                record.accepted = true;
                if verdict == Verdict::Accept {
                    self.machine.accept();
                } else {
                    self.machine.accept_framed();
                }
                self.begin(uid, Who::Target, turn);
            }
            Verdict::Refuse => {
                self.machine.refuse(RefusalCode::Refused, "no");
                self.let_go(uid, turn);
            }
            Verdict::Reset => {
                record.cut = true;
                record.reset_by_target = true;
                self.machine.reset("changed its mind");
                self.let_go(uid, turn);
            }
        }
    }

    fn act_tunnel(&mut self, turn: &mut Turn) {
        let Stage::Tunnel(endpoint) = &mut self.stage else {
            return;
        };
        let uid = endpoint.uid;
        while self.machine.is_sending() && self.machine.queued_frames() < QUEUE_FRAMES_MAX {
            let waiting = self.machine.queued_bytes() + self.out.len();
            let room = QUEUE_BYTES_MAX.saturating_sub(waiting);
            let Some(bytes) = endpoint.next_chunk(room, turn) else {
                break;
            };
            self.machine.send(bytes);
        }
        match endpoint.wish(turn) {
            Some(Wish::Fin) => self.machine.fin(),
            Some(Wish::Close) => self.machine.close("done"),
            Some(Wish::Reset) => {
                self.machine.reset("gone");
                self.let_go(uid, turn);
            }
            None if endpoint.is_unconfirmed(turn.now) => {
                turn.coverage.note(Seen::Unconfirmed);
                self.let_go(uid, turn);
            }
            None if self.machine.is_half_closed() && endpoint.is_silent(turn.now) => {
                turn.coverage.note(Seen::HalfClosedSilent);
                turn.records[uid].cut = true;
                self.machine.reset("half-closed and silent for too long");
                self.let_go(uid, turn);
            }
            None => (),
        }
    }

    fn act_pipe(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        let Stage::Pipe {
            endpoint,
            heard_end,
        } = &mut self.stage
        else {
            return;
        };
        let room = QUEUE_BYTES_MAX.saturating_sub(self.out.len());
        if let Some(bytes) = endpoint.next_chunk(room, turn) {
            self.out.extend_from_slice(&bytes);
        }
        if matches!(endpoint.wish(turn), Some(Wish::Close | Wish::Reset)) {
            turn.records[endpoint.uid].cut = true;
            return self.reset_connection(turn, wires);
        }
        if endpoint.has_finished() && self.out.is_empty() {
            wires.outgoing.finish(turn.now);
            if *heard_end {
                turn.coverage.note(Seen::PipeWhole);
                turn.moved = true;
                self.closed = true;
            }
        }
    }

    /// Waits until the lane is clean, or resets it.
    fn act_settling(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        let left = self.unacknowledged(wires);
        let (is_idle, is_flushed) = (self.machine.is_idle(), self.is_flushed());
        let Stage::Settling {
            uid,
            before,
            until,
            cutting,
        } = &mut self.stage
        else {
            return;
        };
        if is_idle && is_flushed {
            self.machine.rest();
            self.stage = Stage::Idle;
            turn.moved = true;
            return;
        }
        if turn.now < *until {
            return;
        }
        if *cutting {
            turn.coverage.note(Seen::ResetUnanswered);
            turn.records[*uid].cut |= !is_idle;
            return self.reset_connection(turn, wires);
        }
        if self.machine.is_resetting() || left >= *before {
            if !self.machine.is_resetting() {
                turn.coverage.note(Seen::NoProgress);
                turn.records[*uid].cut |= !is_idle;
            }
            *cutting = true;
            *until = turn.now.after(RESET_ANSWERED_WITHIN);
            self.machine.reset("no progress after its end");
            turn.moved = true;
            return;
        }
        *before = left;
        let patience = if left == 0 { TAKEN_WITHIN } else { LINGERS_FOR };
        *until = turn.now.after(patience);
    }

    /// The next moment at which this end acts by itself.
    pub(in crate::lanes) fn wakes_at(&self, now: Moment) -> Option<Moment> {
        let at = match &self.stage {
            _ if self.closed => None,
            Stage::Idle => None,
            Stage::Opening {
                judged_at,
                gives_up_at,
                ..
            } => Some(judged_at.map_or(*gives_up_at, |at| at.min(*gives_up_at))),
            Stage::Answering { ends_at, .. } => *ends_at,
            Stage::Tunnel(endpoint) | Stage::Pipe { endpoint, .. } => endpoint.wakes_at(now),
            Stage::Settling { until, .. } => Some(*until),
        };
        at.filter(|at| *at > now)
    }
}
