//! Sets of rules. A connect call sees one whole set, never parts of two.
//!
//! The table has room for two generations, told apart by the first byte of a key. A new set is written completely beside
//! the active one; then one number selects it. The replaced set stays until the next set needs the room, a while later. So
//! a call that has begun ends with the set it began with.
//!
//! The tables are locked for one rule at a time: accepting a connection needs them, too, and must not wait for thousands of
//! rules.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use adit_ebpf_abi::{Rule, RuleKey};

use crate::maps::{RedirectMaps, locked};
use crate::object::KernelError;
use crate::redirect::RedirectRule;

type Place = (RuleKey, u32);

/// How long a replaced set is kept: a call takes microseconds, unless its processor is taken away.
const KEPT_FOR: Duration = Duration::from_millis(100);

/// Contents of the table.
#[derive(Default)]
pub(super) struct Generations {
    /// Rules of every set, by place in the first generation.
    kept: HashMap<Place, RedirectRule>,
    written: [HashSet<Place>; 2],
    current: u8,
    sets: u64,
    replaced_at: Option<Instant>,
}

impl Generations {
    /// Adds rules that are part of every set; they win over other rules of a set for the same destinations.
    pub(super) fn keep(
        &mut self,
        maps: &Mutex<RedirectMaps>,
        rules: &[RedirectRule],
    ) -> Result<(), KernelError> {
        for rule in rules {
            let (key, value) = rule.entry(0);
            self.kept.insert((key, value.prefix_bits), *rule);
            self.write(maps, self.current, rule.entry(self.current))?;
        }
        Ok(())
    }

    /// Activates a set and returns the number of sets so far. After an error the old set is active. Blocks for moments
    /// after another set.
    pub(super) fn replace(
        &mut self,
        maps: &Mutex<RedirectMaps>,
        rules: &[RedirectRule],
    ) -> Result<u64, KernelError> {
        let next = 1 - self.current;
        if let Some(at) = self.replaced_at {
            std::thread::sleep(KEPT_FOR.saturating_sub(at.elapsed()));
        }
        self.clear(maps, next)?;
        let kept: Vec<RedirectRule> = self.kept.values().copied().collect();
        for rule in rules.iter().chain(&kept) {
            if let Err(error) = self.write(maps, next, rule.entry(next)) {
                self.clear(maps, next)?;
                return Err(error);
            }
        }
        locked(maps).set_generation(next)?;
        self.current = next;
        self.replaced_at = Some(Instant::now());
        self.sets += 1;
        Ok(self.sets)
    }

    fn write(
        &mut self,
        maps: &Mutex<RedirectMaps>,
        generation: u8,
        (key, value): (RuleKey, Rule),
    ) -> Result<(), KernelError> {
        locked(maps).set_rule(key, value)?;
        self.written[usize::from(generation)].insert((key, value.prefix_bits));
        Ok(())
    }

    fn clear(&mut self, maps: &Mutex<RedirectMaps>, generation: u8) -> Result<(), KernelError> {
        let written = &mut self.written[usize::from(generation)];
        while let Some((key, bits)) = written.iter().next().copied() {
            locked(maps).remove_rule(key, bits)?;
            written.remove(&(key, bits));
        }
        Ok(())
    }
}
