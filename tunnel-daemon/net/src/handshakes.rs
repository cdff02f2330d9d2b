//! Whose turn a TLS handshake is, of those that have connected to a listener. It knows neither TLS nor sockets.
//!
//! A connection is silent until its peer's first byte, waits then for one of the slots, and holds it for its handshake. The
//! silent hold none, and beyond their number the oldest is closed: whoever speaks soon gets on, however many never do. A
//! free slot goes to the address that holds fewest, and none has more than half of them: a fleet behind one address waits its
//! turn, and so does whoever means harm, but nobody else has to wait for them. Where slots are short, a handshake that its
//! peer does not go on with is ended for one that waits.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    future::Future,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use crate::source_quota::host_of;
use adit_config::limits::SPEAKS_WITHIN;
use adit_tls::stream::PeerAddr;

/// Bounds of one listener, each at least 1.
#[derive(Clone, Copy, Debug)]
pub struct HandshakeLimits {
    /// Handshakes in flight. One address has at most half of them.
    pub handshakes_max: usize,
    /// Connections whose peer has said nothing yet; for one more the oldest is closed.
    pub silent_max: usize,
    /// Connections that wait for a slot; for one more the newest is closed, of the address that most of them have.
    pub waiting_max: usize,
    /// A peer that lets its handshake wait for longer may lose its slot.
    pub answers_within: Duration,
}

impl HandshakeLimits {
    fn of_one_source(&self) -> usize {
        self.handshakes_max.div_ceil(2)
    }
}

/// Why a connection has no turn for its handshake, or no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTurn {
    /// Not a byte within the deadline.
    #[error("the peer said nothing in the time for a handshake")]
    Silent,
    /// The longest silent of too many.
    #[error("the peer has said nothing yet, and newer connections need the room")]
    CrowdedOut,
    /// Its peer went away without a byte.
    #[error("the peer closed the connection without a byte")]
    Closed,
    /// No slot within the deadline.
    #[error("no handshake could begin in time: others take all there may be")]
    NoSlot,
    /// One of too many that wait.
    #[error("too many connections wait for a handshake, most of them of this address")]
    TooMany,
    /// Its handshake has begun and does not go on.
    #[error("the peer does not go on with its handshake, and others wait for one")]
    Stalled,
}

/// Whom slots are shared out among, see [`host_of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Source(Option<IpAddr>);

impl Source {
    fn of(peer: PeerAddr) -> Self {
        Self(host_of(peer))
    }
}

/// The slots of one listener, and who has none.
#[derive(Debug)]
pub(super) struct Handshakes {
    limits: HandshakeLimits,
    lines: Mutex<Lines>,
}

/// Calls a connection when it is its turn. Dropped, it sends the connection away.
type Caller = oneshot::Sender<()>;

/// Where each connection stands, by a number in the order of arrival: in one of these lists, or in none once sent away.
#[derive(Debug, Default)]
struct Lines {
    next: u64,
    silent: BTreeMap<u64, Silent>,
    sources: HashMap<Source, Line>,
    /// Over all sources, as is the next.
    waiting: usize,
    holding: usize,
}

/// A connection whose peer has said nothing yet.
#[derive(Debug)]
struct Silent {
    since: Instant,
    caller: Caller,
}

/// Connections of one source that have spoken.
#[derive(Debug, Default)]
struct Line {
    waiting: BTreeMap<u64, Caller>,
    /// Of those that have stalled, also what sends them away.
    holding: BTreeMap<u64, Option<Caller>>,
}

impl Line {
    fn oldest_stalled(&self) -> Option<u64> {
        let mut holding = self.holding.iter();
        let stalled = holding.find(|(_, caller)| caller.is_some());
        stalled.map(|(number, _)| *number)
    }
}

/// A connection's place; dropping it gives up whatever it has, a slot that it was not told of yet included.
#[derive(Debug)]
pub(super) struct Place {
    handshakes: Arc<Handshakes>,
    number: u64,
    source: Source,
    called: oneshot::Receiver<()>,
}

impl Handshakes {
    pub(super) fn new(limits: HandshakeLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            lines: Mutex::default(),
        })
    }

    /// A connection more, silent so far.
    pub(super) fn enter(self: &Arc<Self>, peer: PeerAddr) -> Place {
        let (caller, called) = oneshot::channel();
        let since = Instant::now();
        let mut lines = self.lock();
        let number = lines.next;
        lines.next += 1;
        lines.silent.insert(number, Silent { since, caller });
        if lines.silent.len() > self.limits.silent_max {
            lines.silent.pop_first();
        }
        drop(lines);
        Place {
            handshakes: Arc::clone(self),
            number,
            source: Source::of(peer),
            called,
        }
    }

    /// Sends the oldest silent connection away; false when none has been silent for [`SPEAKS_WITHIN`].
    pub(super) fn close_oldest_silent(&self) -> bool {
        let mut lines = self.lock();
        match lines.silent.first_entry() {
            Some(oldest) if oldest.get().since.elapsed() >= SPEAKS_WITHIN => {
                let _sent_away = oldest.remove();
                true
            }
            Some(_) | None => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lines {
    /// Puts a connection that has spoken in line.
    fn wait(&mut self, source: Source, number: u64, caller: Caller, limits: &HandshakeLimits) {
        let line = self.sources.entry(source).or_default();
        line.waiting.insert(number, caller);
        self.waiting += 1;
        self.hand_out(limits);
        self.take_back(limits);
        if self.waiting > limits.waiting_max {
            self.send_newest_away();
        }
    }

    /// Calls whoever may begin.
    fn hand_out(&mut self, limits: &HandshakeLimits) {
        while self.waiting > 0 && self.holding < limits.handshakes_max {
            let lines = self.sources.values_mut();
            let next = lines
                .filter(|line| line.holding.len() < limits.of_one_source())
                .filter(|line| !line.waiting.is_empty())
                .min_by_key(|line| (line.holding.len(), line.waiting.keys().next().copied()));
            let Some(line) = next else { return };
            let Some((number, caller)) = line.waiting.pop_first() else {
                return;
            };
            line.holding.insert(number, None);
            self.waiting -= 1;
            self.holding += 1;
            // One that gives up at this moment hands the slot on when its place is dropped.
            let _given_up = caller.send(());
        }
    }

    /// A handshake does not go on.
    fn stall(&mut self, source: Source, number: u64, caller: Caller, limits: &HandshakeLimits) {
        let line = self.sources.get_mut(&source);
        if let Some(slot) = line.and_then(|line| line.holding.get_mut(&number)) {
            *slot = Some(caller);
            self.take_back(limits);
        }
    }

    /// Ends a stalled handshake if its slot is of use for one that waits: of the source with most, the oldest. Of another
    /// source only when there are no more slots, and only if that holds more.
    fn take_back(&mut self, limits: &HandshakeLimits) {
        let waiting = self
            .sources
            .values()
            .filter(|line| !line.waiting.is_empty());
        let Some(fewest) = waiting.map(|line| line.holding.len()).min() else {
            return;
        };
        let all_taken = self.holding >= limits.handshakes_max;
        let lines = self.sources.values_mut();
        let most = lines
            .filter_map(|line| Some((line.oldest_stalled()?, line)))
            .filter(|(_, line)| {
                !line.waiting.is_empty() || (all_taken && line.holding.len() > fewest)
            })
            .max_by_key(|(oldest, line)| (line.holding.len(), Reverse(*oldest)));
        if let Some((oldest, line)) = most {
            let _sent_away = line.holding.remove(&oldest);
            self.holding -= 1;
            self.hand_out(limits);
        }
    }

    /// Closes one of those that wait. The oldest are about to be served.
    fn send_newest_away(&mut self) {
        let lines = self.sources.values_mut();
        let longest = lines.max_by_key(|line| {
            // Of several the one with the newest, or whoever has waited longest could be the one to go.
            let newest = line.waiting.keys().next_back().copied();
            (line.waiting.len(), newest)
        });
        if longest.is_some_and(|line| line.waiting.pop_last().is_some()) {
            self.waiting -= 1;
        }
    }

    /// A connection is no more, wherever it stood.
    fn leave(&mut self, source: Source, number: u64, limits: &HandshakeLimits) {
        if self.silent.remove(&number).is_some() {
            return;
        }
        let Some(line) = self.sources.get_mut(&source) else {
            return;
        };
        if line.waiting.remove(&number).is_some() {
            self.waiting -= 1;
        }
        if line.holding.remove(&number).is_some() {
            self.holding -= 1;
        }
        if line.waiting.is_empty() && line.holding.is_empty() {
            self.sources.remove(&source);
        }
        self.hand_out(limits);
    }
}

impl Place {
    /// Waits for the peer's first byte, then for a slot, together until `until`. The slot is held until the place is
    /// dropped. `first_byte` is false if there will be none. Called once; a cancelled call leaves the place to be dropped.
    ///
    /// # Errors
    /// See [`NoTurn`]: the connection is to be closed.
    pub(super) async fn turn(
        &mut self,
        first_byte: impl Future<Output = bool>,
        until: Instant,
    ) -> Result<(), NoTurn> {
        let spoke = async {
            tokio::select! {
                biased;
                is_there = first_byte => is_there.then_some(()).ok_or(NoTurn::Closed),
                _sent_away = &mut self.called => Err(NoTurn::CrowdedOut),
            }
        };
        timeout_at(until, spoke)
            .await
            .map_err(|_elapsed| NoTurn::Silent)??;
        self.wait()?;
        timeout_at(until, &mut self.called)
            .await
            .map_err(|_elapsed| NoTurn::NoSlot)?
            .map_err(|_sent_away| NoTurn::TooMany)
    }

    /// Waits until the slot is taken back for another connection. To be called once the handshake waits for its peer, whose
    /// time for an answer begins here. A cancelled call leaves the place to be dropped.
    pub(super) async fn taken_back(&self) -> NoTurn {
        let limits = &self.handshakes.limits;
        tokio::time::sleep(limits.answers_within).await;
        let (caller, called) = oneshot::channel();
        let (source, number) = (self.source, self.number);
        self.handshakes.lock().stall(source, number, caller, limits);
        // Nobody calls: the caller goes with the slot.
        let _sent_away = called.await;
        NoTurn::Stalled
    }

    /// From silence into the line.
    fn wait(&self) -> Result<(), NoTurn> {
        let mut lines = self.handshakes.lock();
        let silent = lines.silent.remove(&self.number);
        let Silent { caller, .. } = silent.ok_or(NoTurn::CrowdedOut)?;
        lines.wait(self.source, self.number, caller, &self.handshakes.limits);
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let limits = &self.handshakes.limits;
        self.handshakes
            .lock()
            .leave(self.source, self.number, limits);
    }
}

#[cfg(test)]
mod tests;
