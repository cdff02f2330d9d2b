//! Tunnels of a link by [`TunnelKey`]: a reused slot has a new generation, so a late event finds nothing.

use crate::ids::TunnelKey;

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// A growing table with stable keys.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    /// `None` only if four billion tunnels are open.
    pub(super) fn insert(&mut self, value: T) -> Option<TunnelKey> {
        if let Some(slot) = self.free.pop()
            && let Some(place) = self.slots.get_mut(slot as usize)
        {
            place.value = Some(value);
            return Some(TunnelKey {
                slot,
                generation: place.generation,
            });
        }
        let slot = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot {
            generation: 0,
            value: Some(value),
        });
        Some(TunnelKey {
            slot,
            generation: 0,
        })
    }

    pub(super) fn get(&self, key: TunnelKey) -> Option<&T> {
        self.slots
            .get(key.slot as usize)
            .filter(|s| s.generation == key.generation)?
            .value
            .as_ref()
    }

    pub(super) fn get_mut(&mut self, key: TunnelKey) -> Option<&mut T> {
        self.slots
            .get_mut(key.slot as usize)
            .filter(|s| s.generation == key.generation)?
            .value
            .as_mut()
    }

    pub(super) fn remove(&mut self, key: TunnelKey) -> Option<T> {
        let place = self
            .slots
            .get_mut(key.slot as usize)
            .filter(|s| s.generation == key.generation)?;
        let value = place.value.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(key.slot);
        Some(value)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TunnelKey, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, place)| {
            let slot = u32::try_from(slot).ok()?;
            Some((
                TunnelKey {
                    slot,
                    generation: place.generation,
                },
                place.value.as_ref()?,
            ))
        })
    }

    pub(super) fn keys(&self) -> Vec<TunnelKey> {
        self.iter().map(|(key, _)| key).collect()
    }
}
