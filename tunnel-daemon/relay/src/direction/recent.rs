//! Bytes per wake-up of a direction.

/// Number of wake-ups remembered.
const KEPT: usize = 8;

/// Bytes of the last eight wake-ups.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    sizes: [u32; KEPT],
    next: u8,
    kept: u8,
}

impl Recent {
    pub(super) fn record(&mut self, bytes: u64) {
        self.sizes[usize::from(self.next)] = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.next = (self.next + 1) % 8;
        self.kept = (self.kept + 1).min(8);
    }

    /// Whether eight wake-ups were recorded.
    pub(super) fn is_full(&self) -> bool {
        usize::from(self.kept) == KEPT
    }

    /// Mean of the recorded wake-ups; zero before the first.
    pub(super) fn average(&self) -> u32 {
        let sum: u64 = self.sizes.iter().map(|size| u64::from(*size)).sum();
        u32::try_from(sum / u64::from(self.kept.max(1))).unwrap_or(u32::MAX)
    }
}
