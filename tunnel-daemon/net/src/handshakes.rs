//! Shares out slots for TLS handshakes among the connections of a listener. Knows neither TLS nor sockets.
//!
//! A connection is silent until its peer's first byte. It then waits for a slot, and holds the slot for its handshake.
//! Silent connections hold no slot; above a limit the oldest is closed, so peers that speak soon are served however many
//! stay silent. A free slot goes to the address that holds fewest, and no address holds more than half. A fleet behind one
//! address, or an attacker, waits for slots without delaying other addresses. Where slots are short, a stalled handshake is
//! ended for a waiting connection.
//!
//! Within an address the oldest connection comes first while fewer wait than the address may hold. A longer line is served from
//! its newest end: its oldest connections have little time left, and a new agent would wait behind all of a flood of its
//! address, however short the flood. While a flood goes on faster than slots become free, no order helps: an agent and an attacker
//! of one address cannot be told apart before a handshake.

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
    /// Connections whose peer has sent nothing yet. Above this the oldest is closed.
    pub silent_max: usize,
    /// Connections that wait for a slot. Above this, one of the address with most of them is closed: the one that would be
    /// served last.
    pub waiting_max: usize,
    /// A peer that delays its handshake for longer may lose its slot.
    pub answers_within: Duration,
}

impl HandshakeLimits {
    fn of_one_source(&self) -> usize {
        self.handshakes_max.div_ceil(2)
    }
}

/// Why a connection got no slot for its handshake, or lost the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// No byte within the deadline.
    #[error("the peer said nothing in the time for a handshake")]
    Silent,
    /// The oldest of too many silent connections.
    #[error(
        "the peer sent nothing; the limit of silent connections is reached, and this connection was the oldest"
    )]
    CrowdedOut,
    /// The peer closed the connection without a byte.
    #[error("the peer closed the connection without a byte")]
    Closed,
    /// No slot within the deadline.
    #[error("all handshake slots stayed in use until the deadline")]
    NoSlot,
    /// One of too many waiting connections.
    #[error("too many connections wait for a handshake, most of them of this address")]
    TooMany,
    /// The handshake stalled while other connections wait.
    #[error("the peer does not go on with its handshake, and others wait for one")]
    Stalled,
}

/// The unit among which slots are shared out, see [`host_of`].
type Source = Option<IpAddr>;

/// The slots of one listener, and the connections without one.
#[derive(Debug)]
pub(super) struct Handshakes {
    limits: HandshakeLimits,
    lines: Mutex<Lines>,
}

/// Tells a connection that it has a slot. Dropping it closes the connection.
type Caller = oneshot::Sender<()>;

/// The state of each connection, by a number in the order of arrival: in one of these lists, or in none once closed.
#[derive(Debug, Default)]
struct Lines {
    next: u64,
    silent: BTreeMap<u64, Silent>,
    sources: HashMap<Source, Line>,
    /// Over all sources, as is `holding`.
    waiting: usize,
    holding: usize,
}

/// A connection whose peer has sent nothing yet.
#[derive(Debug)]
struct Silent {
    since: Instant,
    caller: Caller,
}

/// Connections of one source whose peers have sent a byte.
#[derive(Debug, Default)]
struct Line {
    waiting: BTreeMap<u64, Caller>,
    /// For stalled connections with the caller, whose drop closes the connection.
    holding: BTreeMap<u64, Option<Caller>>,
}

impl Line {
    /// Whether the newest connection is served first: more wait than the source may hold.
    fn is_long(&self, limits: &HandshakeLimits) -> bool {
        self.waiting.len() > limits.of_one_source()
    }

    /// Removes the connection that is served next.
    fn pop_next(&mut self, limits: &HandshakeLimits) -> Option<(u64, Caller)> {
        if self.is_long(limits) {
            self.waiting.pop_last()
        } else {
            self.waiting.pop_first()
        }
    }

    /// Removes the connection that would be served last.
    fn pop_last(&mut self, limits: &HandshakeLimits) -> Option<(u64, Caller)> {
        if self.is_long(limits) {
            self.waiting.pop_first()
        } else {
            self.waiting.pop_last()
        }
    }

    fn oldest_stalled(&self) -> Option<u64> {
        let mut holding = self.holding.iter();
        let stalled = holding.find(|(_, caller)| caller.is_some());
        stalled.map(|(number, _)| *number)
    }
}

/// A connection's place in the lists. Dropping it frees the slot, even one that the connection was not told of yet.
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

    /// Adds a connection, silent so far.
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
            source: host_of(peer),
            called,
        }
    }

    /// Closes the oldest silent connection; false when none has been silent for [`SPEAKS_WITHIN`].
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
    /// Queues a connection whose peer has sent a byte.
    fn wait(&mut self, source: Source, number: u64, caller: Caller, limits: &HandshakeLimits) {
        let line = self.sources.entry(source).or_default();
        line.waiting.insert(number, caller);
        self.waiting += 1;
        self.hand_out(limits);
        self.take_back(limits);
        if self.waiting > limits.waiting_max {
            self.send_last_away(limits);
        }
    }

    /// Hands out free slots.
    fn hand_out(&mut self, limits: &HandshakeLimits) {
        while self.waiting > 0 && self.holding < limits.handshakes_max {
            let lines = self.sources.values_mut();
            let next = lines
                .filter(|line| line.holding.len() < limits.of_one_source())
                .filter(|line| !line.waiting.is_empty())
                .min_by_key(|line| (line.holding.len(), line.waiting.keys().next().copied()));
            let Some(line) = next else { return };
            let Some((number, caller)) = line.pop_next(limits) else {
                return;
            };
            line.holding.insert(number, None);
            self.waiting -= 1;
            self.holding += 1;
            // A connection that gives up at this moment passes the slot on when its place is dropped.
            let _given_up = caller.send(());
        }
    }

    /// A handshake has stalled.
    fn stall(&mut self, source: Source, number: u64, caller: Caller, limits: &HandshakeLimits) {
        let line = self.sources.get_mut(&source);
        if let Some(slot) = line.and_then(|line| line.holding.get_mut(&number)) {
            *slot = Some(caller);
            self.take_back(limits);
        }
    }

    /// Ends a stalled handshake whose slot a waiting connection can use: the oldest one of the source that holds most. A
    /// source without waiting connections loses a slot only when all slots are taken, and only if it holds more than a
    /// waiting source.
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

    /// Closes the waiting connection of the longest line that would be served last.
    fn send_last_away(&mut self, limits: &HandshakeLimits) {
        let lines = self.sources.values_mut();
        let longest = lines.max_by_key(|line| {
            // Of several lines, take the one with the newest connection: the oldest of all must not be closed.
            let newest = line.waiting.keys().next_back().copied();
            (line.waiting.len(), newest)
        });
        if longest.is_some_and(|line| line.pop_last(limits).is_some()) {
            self.waiting -= 1;
        }
    }

    /// Removes a connection from its list.
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
    /// Waits for the peer's first byte, then for a slot, both until `until`. The place holds the slot until it is dropped.
    /// `first_byte` is false if the peer will send nothing. To be called once; after a cancelled call the place must be
    /// dropped.
    ///
    /// # Errors
    /// See [`SlotError`]: the connection is to be closed.
    pub(super) async fn acquire_slot(
        &mut self,
        first_byte: impl Future<Output = bool>,
        until: Instant,
    ) -> Result<(), SlotError> {
        let spoke = async {
            tokio::select! {
                biased;
                is_there = first_byte => is_there.then_some(()).ok_or(SlotError::Closed),
                _sent_away = &mut self.called => Err(SlotError::CrowdedOut),
            }
        };
        timeout_at(until, spoke)
            .await
            .map_err(|_elapsed| SlotError::Silent)??;
        self.wait()?;
        timeout_at(until, &mut self.called)
            .await
            .map_err(|_elapsed| SlotError::NoSlot)?
            .map_err(|_sent_away| SlotError::TooMany)
    }

    /// Waits until the slot is taken back for another connection. To be called when the handshake waits for its peer, whose
    /// time to answer begins here. After a cancelled call the place must be dropped.
    pub(super) async fn taken_back(&self) -> SlotError {
        let limits = &self.handshakes.limits;
        tokio::time::sleep(limits.answers_within).await;
        let (caller, called) = oneshot::channel();
        let (source, number) = (self.source, self.number);
        self.handshakes.lock().stall(source, number, caller, limits);
        // The caller is never used: dropping it takes the slot back.
        let _sent_away = called.await;
        SlotError::Stalled
    }

    /// Moves a silent connection to the queue.
    fn wait(&self) -> Result<(), SlotError> {
        let mut lines = self.handshakes.lock();
        let silent = lines.silent.remove(&self.number);
        let Silent { caller, .. } = silent.ok_or(SlotError::CrowdedOut)?;
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
