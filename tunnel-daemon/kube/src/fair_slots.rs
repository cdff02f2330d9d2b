//! Concurrency limit of token reviews. Callers wait in one queue per address, and the queues are served in rotation, so that many
//! callers at one address barely delay callers at others.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_host::interfaces::host_of;
use tokio::sync::oneshot;

/// Callers of one address that may wait, unless it is trusted.
const WAITING_PER_ADDRESS_MAX: usize = 16;

/// Where a caller comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caller {
    /// Its address; `None` on a unix socket.
    pub address: Option<IpAddr>,
    /// A caller at that address was let in, and is still there.
    pub is_trusted: bool,
}

#[derive(Debug)]
pub(crate) struct FairSlots {
    in_use_max: usize,
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Default, Debug)]
struct State {
    in_use: usize,
    waiting: usize,
    queues: HashMap<Option<IpAddr>, VecDeque<oneshot::Sender<Slot>>>,
    /// Addresses with a queue, the next one first.
    order: VecDeque<Option<IpAddr>>,
}

/// Too many callers wait already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Full;

/// One use of the resource. Dropping it passes the use to the next caller.
#[derive(Debug)]
pub(crate) struct Slot(Option<Arc<FairSlots>>);

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(limit) = self.0.take() {
            limit.pass_on();
        }
    }
}

/// Removes a caller that stops waiting.
struct Waiting<'a> {
    limit: &'a FairSlots,
    address: Option<IpAddr>,
    receiver: oneshot::Receiver<Slot>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.receiver.close();
        // A slot that was given meanwhile passes on when it is dropped, which needs the lock.
        let given = self.receiver.try_recv().ok();
        let mut state = self.limit.lock();
        state.waiting -= 1;
        if let Some(queue) = state.queues.get_mut(&self.address) {
            queue.retain(|caller| !caller.is_closed());
        }
        drop(state);
        drop(given);
    }
}

impl FairSlots {
    pub(crate) fn new(in_use_max: usize, waiting_max: usize) -> Arc<Self> {
        Arc::new(Self {
            in_use_max,
            waiting_max,
            state: Mutex::default(),
        })
    }

    /// Uses now.
    pub(crate) fn in_use(&self) -> usize {
        self.lock().in_use
    }

    /// Waits for a slot. A cancelled call waits no more.
    ///
    /// # Errors
    /// Too many callers wait, in all or of this address.
    pub(crate) async fn acquire(self: &Arc<Self>, caller: Caller) -> Result<Slot, Full> {
        let address = caller.address.map(host_of);
        let mut waiting = {
            let mut state = self.lock();
            if state.in_use < self.in_use_max {
                state.in_use += 1;
                return Ok(Slot(Some(Arc::clone(self))));
            }
            let queued = state.queues.get(&address).map_or(0, VecDeque::len);
            let is_crowded = !caller.is_trusted && queued >= WAITING_PER_ADDRESS_MAX;
            // Half of the places are kept for trusted addresses.
            let is_full = if caller.is_trusted {
                state.waiting >= self.waiting_max
            } else {
                state.waiting >= self.waiting_max / 2
            };
            if is_full || is_crowded {
                return Err(Full);
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting += 1;
            let state = &mut *state;
            state
                .queues
                .entry(address)
                .or_insert_with(|| {
                    state.order.push_back(address);
                    VecDeque::new()
                })
                .push_back(sender);
            Waiting {
                limit: self,
                address,
                receiver,
            }
        };
        // The sender is dropped only with its queue, which outlives the callers in it.
        (&mut waiting.receiver).await.map_err(|_gone| Full)
    }

    /// Passes a used slot to the next caller.
    fn pass_on(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            let Some(next) = state.next() else {
                state.in_use -= 1;
                return;
            };
            drop(state);
            match next.send(Slot(Some(Arc::clone(self)))) {
                Ok(()) => return,
                // The caller has left. Dropping the slot as it is would recurse, once for each such caller.
                Err(mut unused) => drop(unused.0.take()),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held; if it did, the state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The first caller of the next address.
    fn next(&mut self) -> Option<oneshot::Sender<Slot>> {
        while let Some(address) = self.order.pop_front() {
            let Some(queue) = self.queues.get_mut(&address) else {
                continue;
            };
            let next = queue.pop_front();
            if queue.is_empty() {
                self.queues.remove(&address);
            } else {
                self.order.push_back(address);
            }
            if next.is_some() {
                return next;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::{FutureExt as _, poll};

    use super::*;

    fn at(last: u8) -> Caller {
        Caller {
            address: Some([10, 0, 0, last].into()),
            is_trusted: false,
        }
    }

    #[tokio::test]
    async fn slots_go_to_addresses_round_robin() {
        let limit = FairSlots::new(1, 100);
        let first = limit.acquire(at(9)).await.unwrap();
        let mut waiters: Vec<_> = (0..3).map(|_| Box::pin(limit.acquire(at(1)))).collect();
        for waits in &mut waiters {
            assert!(poll!(waits).is_pending());
        }
        let mut other = pin!(limit.acquire(at(2)));
        assert!(poll!(other.as_mut()).is_pending());
        drop(first);
        let slot = waiters.remove(0).now_or_never().unwrap().unwrap();
        drop(slot);
        let slot = other
            .now_or_never()
            .expect("the other address is next")
            .unwrap();
        drop(slot);
        for waits in waiters {
            drop(waits.now_or_never().unwrap().unwrap());
        }
        assert_eq!(limit.in_use(), 0);
        let state = limit.lock();
        assert!(state.queues.is_empty() && state.order.is_empty() && state.waiting == 0);
    }

    /// Limit (peers): Token reviews
    #[tokio::test]
    async fn waiters_are_bounded_in_total_and_per_untrusted_address() {
        let limit = FairSlots::new(1, 34);
        let _used = limit.acquire(at(9)).await.unwrap();
        let mut waiting: Vec<_> = (0..WAITING_PER_ADDRESS_MAX)
            .map(|_| Box::pin(limit.acquire(at(1))))
            .collect();
        for waits in &mut waiting {
            assert!(poll!(waits).is_pending());
        }
        assert_eq!(
            limit.acquire(at(1)).now_or_never().unwrap().unwrap_err(),
            Full
        );
        let trusted = Caller {
            is_trusted: true,
            ..at(1)
        };
        for _caller in WAITING_PER_ADDRESS_MAX..17 {
            let mut waits = Box::pin(limit.acquire(trusted));
            assert!(poll!(&mut waits).is_pending());
            waiting.push(waits);
        }
        assert_eq!(
            limit.acquire(at(2)).now_or_never().unwrap().unwrap_err(),
            Full
        );
        assert!(
            poll!(pin!(limit.acquire(trusted))).is_pending(),
            "half are kept"
        );
        waiting.clear();
        assert_eq!(limit.lock().waiting, 0);
        assert!(poll!(pin!(limit.acquire(at(2)))).is_pending());
    }

    /// This includes a slot granted to a caller that has left.
    #[tokio::test]
    async fn no_slot_is_lost() {
        let limit = FairSlots::new(2, 100);
        let used = [
            limit.acquire(at(1)).await.unwrap(),
            limit.acquire(at(1)).await.unwrap(),
        ];
        let mut waiting: Vec<_> = (0..10).map(|n| Box::pin(limit.acquire(at(n)))).collect();
        for waits in &mut waiting {
            assert!(poll!(waits).is_pending());
        }
        drop(used);
        // Two callers hold slots that they have not seen. Dropping a caller passes its slot on, so only the remaining
        // caller has one.
        waiting.truncate(1);
        let mine = waiting.remove(0).now_or_never().unwrap().unwrap();
        assert_eq!(limit.in_use(), 1);
        drop(mine);
        assert_eq!(limit.in_use(), 0);
    }
}
