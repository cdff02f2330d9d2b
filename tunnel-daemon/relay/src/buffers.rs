//! Buffers of one thread. A direction has a buffer only while it moves or holds bytes, so an idle pair has none.

/// Buffer size of a new direction, kept while reads are small.
pub(crate) const SMALL: usize = 16 * 1024;
/// Buffer size that a direction with full reads reaches in two steps.
pub(crate) const LARGE: usize = 256 * 1024;
/// Factor of each growth step.
pub(crate) const GROWTH: usize = 4;

const SIZES: [usize; 3] = [SMALL, SMALL * GROWTH, LARGE];
/// Most free buffers kept per size: enough for the pairs of one turn; bounds the memory kept after a burst.
const FREE_MAX: [usize; 3] = [64, 16, 8];

/// Free buffers, and the bytes of lent buffers.
#[derive(Debug)]
pub(crate) struct Buffers {
    free: [Vec<Vec<u8>>; 3],
    lent_bytes: usize,
    budget_bytes: usize,
    refused: u64,
}

impl Buffers {
    pub(crate) fn new(budget_bytes: usize) -> Self {
        Self {
            free: [Vec::new(), Vec::new(), Vec::new()],
            lent_bytes: 0,
            budget_bytes,
            refused: 0,
        }
    }

    /// Lends a buffer of `size`, or of the smallest size if the budget is used up. Its contents are arbitrary.
    pub(crate) fn lend(&mut self, size: usize) -> Vec<u8> {
        let mut class = SIZES.iter().position(|one| *one >= size).unwrap_or(2);
        if class > 0 && self.lent_bytes + SIZES[class] > self.budget_bytes {
            self.refused += 1;
            class = 0;
        }
        self.lent_bytes += SIZES[class];
        self.free[class]
            .pop()
            .unwrap_or_else(|| vec![0; SIZES[class]])
    }

    pub(crate) fn take_back(&mut self, buffer: Vec<u8>) {
        let Some(class) = SIZES.iter().position(|one| *one == buffer.len()) else {
            return; // The empty buffer of a direction without a buffer.
        };
        self.lent_bytes -= SIZES[class];
        if self.free[class].len() < FREE_MAX[class] {
            self.free[class].push(buffer);
        }
    }

    /// How often a buffer was not allowed to grow since the last call.
    pub(crate) fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    pub(crate) fn lent_bytes(&self) -> usize {
        self.lent_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_are_lent_again() {
        let mut buffers = Buffers::new(usize::MAX);
        let mut one = buffers.lend(LARGE);
        one[0] = 7;
        assert_eq!(buffers.lent_bytes(), LARGE);
        buffers.take_back(one);
        assert_eq!(buffers.lent_bytes(), 0);
        assert_eq!(buffers.lend(LARGE)[0], 7);
    }

    /// Limit (memory): Relay buffers | 64 MiB per process, then 16 KiB per direction with data
    #[test]
    fn buffer_growth_stops_at_the_budget_but_each_pair_gets_one() {
        let mut buffers = Buffers::new(LARGE);
        let first = buffers.lend(LARGE);
        let second = buffers.lend(LARGE);
        assert_eq!((first.len(), second.len()), (LARGE, SMALL));
        assert_eq!(buffers.take_refused(), 1);
    }

    /// Limit (memory): Relay buffers
    #[test]
    fn burst_leaves_a_bounded_number_of_free_buffers() {
        let mut buffers = Buffers::new(usize::MAX);
        let burst: Vec<_> = (0..1000).map(|_| buffers.lend(SMALL)).collect();
        burst.into_iter().for_each(|one| buffers.take_back(one));
        assert_eq!(buffers.free[0].len(), FREE_MAX[0]);
        assert_eq!(buffers.lent_bytes(), 0);
    }
}
