//! Typed maps of the object. Keys and values are the bytes that the shared types lay out.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuArray};

use adit_ebpf_abi::{
    ARRIVAL_BYTES, ARRIVAL_KEY_BYTES, Arrival, ArrivalKey, CALL_OUTCOMES, LISTENER_BYTES,
    LISTENER_KEY_BYTES, Listener, ListenerKey, PROCESSES_MAX, RULE_BYTES, RULE_KEY_BYTES, Rule,
    RuleKey, SCOPE_BITS,
};

use crate::object::{KernelError, with_set_aside};

const RULES: &str = "REDIRECT_RULES";
const GENERATION: &str = "REDIRECT_GENERATION";
const LISTENERS: &str = "REDIRECT_LISTENERS";
const EXEMPT: &str = "REDIRECT_EXEMPT";
const PROCESSES: &str = "REDIRECT_PROCESSES";
const ARRIVALS: &str = "REDIRECT_ARRIVALS";
const CALLS: &str = "REDIRECT_CALLS";

fn refused(map: &'static str) -> impl FnOnce(MapError) -> KernelError {
    move |error| KernelError::Map {
        map,
        cause: crate::caps::deepest(&error),
    }
}

/// The outcome of removing an entry; a missing entry is fine.
fn removed(map: &'static str, outcome: Result<(), MapError>) -> Result<(), KernelError> {
    match outcome {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(error) => Err(refused(map)(error)),
    }
}

macro_rules! take {
    ($ebpf:expr, $name:ident, $kind:ident) => {
        $kind::try_from(
            $ebpf
                .take_map($name)
                .ok_or(KernelError::NotInObject($name))?,
        )
        .map_err(refused($name))?
    };
}

/// The maps of the redirect, once taken out of a loaded object. Programs keep their own references.
pub struct RedirectMaps {
    rules: LpmTrie<MapData, [u8; RULE_KEY_BYTES], [u8; RULE_BYTES]>,
    generation: Array<MapData, u32>,
    listeners: HashMap<MapData, [u8; LISTENER_KEY_BYTES], [u8; LISTENER_BYTES]>,
    processes: HashMap<MapData, u32, u8>,
    /// Room in `processes`.
    processes_max: u32,
    arrivals: HashMap<MapData, [u8; ARRIVAL_KEY_BYTES], [u8; ARRIVAL_BYTES]>,
    calls: PerCpuArray<MapData, u64>,
}

/// Locks maps for one operation. A panic between two system calls leaves nothing half done in them.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sockets that are never redirected. Locked apart from the other maps: a connecting thread waits neither for thousands of
/// rules nor for a walk over processes.
pub struct ExemptSockets(HashMap<MapData, u64, u8>);

impl ExemptSockets {
    /// Takes the map out of a loaded object.
    ///
    /// # Errors
    /// The object lacks the map, or has another kind of it.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self(take!(ebpf, EXEMPT, HashMap)))
    }

    /// Exempts the socket with this cookie from redirection.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn note(&mut self, socket_cookie: u64) -> Result<(), KernelError> {
        self.0.insert(socket_cookie, 1, 0).map_err(refused(EXEMPT))
    }
}

impl RedirectMaps {
    /// Takes the maps out of a loaded object.
    ///
    /// # Errors
    /// The object lacks a map, or has another kind of it.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self {
            rules: take!(ebpf, RULES, LpmTrie),
            generation: take!(ebpf, GENERATION, Array),
            listeners: take!(ebpf, LISTENERS, HashMap),
            processes: take!(ebpf, PROCESSES, HashMap),
            processes_max: with_set_aside(PROCESSES_MAX),
            arrivals: take!(ebpf, ARRIVALS, HashMap),
            calls: take!(ebpf, CALLS, PerCpuArray),
        })
    }

    /// Adds or replaces the rule for a prefix of [`Rule::prefix_bits`] of `key`.
    ///
    /// # Errors
    /// The map is full.
    pub fn set_rule(&mut self, key: RuleKey, rule: Rule) -> Result<(), KernelError> {
        let prefix = Key::new(SCOPE_BITS + rule.prefix_bits, key.to_bytes());
        self.rules
            .insert(&prefix, rule.to_bytes(), 0)
            .map_err(refused(RULES))
    }

    /// Removes a rule; a missing rule is fine.
    ///
    /// # Errors
    /// The kernel refused for another reason.
    pub fn remove_rule(&mut self, key: RuleKey, prefix_bits: u32) -> Result<(), KernelError> {
        let prefix = Key::new(SCOPE_BITS + prefix_bits, key.to_bytes());
        removed(RULES, self.rules.remove(&prefix))
    }

    /// Activates a generation of rules.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn set_generation(&mut self, generation: u8) -> Result<(), KernelError> {
        self.generation
            .set(0, u32::from(generation), 0)
            .map_err(refused(GENERATION))
    }

    /// Registers the address of a listener.
    ///
    /// # Errors
    /// The map is full.
    pub fn set_listener(
        &mut self,
        key: ListenerKey,
        listener: Listener,
    ) -> Result<(), KernelError> {
        self.listeners
            .insert(key.to_bytes(), listener.to_bytes(), 0)
            .map_err(refused(LISTENERS))
    }

    /// Forgets a listener; a missing listener is fine.
    ///
    /// # Errors
    /// The kernel refused for another reason.
    pub fn remove_listener(&mut self, key: ListenerKey) -> Result<(), KernelError> {
        removed(LISTENERS, self.listeners.remove(&key.to_bytes()))
    }

    /// Ids of processes that are part of the tunnel; processes that join meanwhile may be missing.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn processes(&self) -> Result<HashSet<u32>, KernelError> {
        // Bounded, since a walk begins anew when its current key is removed.
        self.processes
            .keys()
            .take(2 * self.processes_max as usize)
            .collect::<Result<_, _>>()
            .map_err(refused(PROCESSES))
    }

    /// Forgets a process: its calls are redirected from now on. A missing process is fine.
    ///
    /// # Errors
    /// The kernel refused for another reason.
    pub fn forget_process(&mut self, id: u32) -> Result<(), KernelError> {
        removed(PROCESSES, self.processes.remove(&id))
    }

    /// Takes the note of a connection out of the map; `None` if the programs left none, or left it too long ago.
    ///
    /// # Errors
    /// The kernel refused for another reason.
    pub fn take_arrival(
        &mut self,
        key: ArrivalKey,
        now_ns: u64,
    ) -> Result<Option<Arrival>, KernelError> {
        let key = key.to_bytes();
        let found = match self.arrivals.get(&key, 0) {
            Ok(bytes) => Arrival::from_bytes(bytes),
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(refused(ARRIVALS)(error)),
        };
        removed(ARRIVALS, self.arrivals.remove(&key))?;
        Ok(found.is_fresh(now_ns).then_some(found))
    }

    /// Redirected connections that are not accepted yet.
    #[must_use]
    pub fn arrivals_waiting(&self) -> usize {
        self.arrivals.keys().filter(Result::is_ok).count()
    }

    /// Connect calls so far, by outcome in the order of [`CALL_OUTCOMES`].
    ///
    /// # Errors
    /// The kernel refused.
    pub fn calls(&self) -> Result<[u64; CALL_OUTCOMES.len()], KernelError> {
        let mut sums = [0; CALL_OUTCOMES.len()];
        for (sum, (outcome, _)) in sums.iter_mut().zip(CALL_OUTCOMES) {
            let values = self
                .calls
                .get(&(outcome as u32), 0)
                .map_err(refused(CALLS))?;
            *sum = values.iter().sum();
        }
        Ok(sums)
    }
}
