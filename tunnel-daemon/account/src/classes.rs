//! Maps label sets to the small numbers that the kernel stores per connection, up to a limit.

use std::collections::HashMap;

use adit_net::accounts::Labels;
use adit_telemetry::labels::{AccountRole, Label as _};
use adit_telemetry::{AccountMetrics, AccountSeries};

/// Agent and destination class of connections beyond the limit of label sets.
const OTHER: &str = "other";

/// All label sets, each with its series. The first sets are those named `other`, one per role.
pub(super) struct Classes {
    /// Per role, by agent, by class. Nested, so that borrowed texts suffice for a lookup.
    numbers: Vec<HashMap<String, HashMap<String, u32>>>,
    series: Vec<AccountSeries>,
    /// Most label sets, without those named `other`.
    max: usize,
    metrics: AccountMetrics,
}

impl Classes {
    pub(super) fn new(metrics: AccountMetrics, max: usize) -> Self {
        let series = AccountRole::ALL
            .iter()
            .map(|role| metrics.series(*role, OTHER, OTHER))
            .collect();
        metrics.series_in_use(0);
        Self {
            numbers: vec![HashMap::new(); AccountRole::ALL.len()],
            series,
            max,
            metrics,
        }
    }

    /// The number of a label set; beyond the limit the number of `other`.
    pub(super) fn number(&mut self, labels: &Labels<'_>) -> u32 {
        if let Some(number) = self.known(labels) {
            return number;
        }
        let other = u32::try_from(labels.role.index()).unwrap_or(0);
        let in_use = self.series.len() - AccountRole::ALL.len();
        if in_use >= self.max {
            return other;
        }
        let agents = self.numbers.get_mut(labels.role.index());
        let (Some(agents), Ok(number)) = (agents, u32::try_from(self.series.len())) else {
            return other;
        };
        self.series.push(
            self.metrics
                .series(labels.role, labels.agent, labels.destination_class),
        );
        let classes = agents.entry(labels.agent.to_owned()).or_default();
        classes.insert(labels.destination_class.to_owned(), number);
        self.metrics.series_in_use(in_use + 1);
        number
    }

    /// Called for each connection, so allocates no memory.
    fn known(&self, labels: &Labels<'_>) -> Option<u32> {
        let agents = self.numbers.get(labels.role.index())?;
        let classes = agents.get(labels.agent)?;
        classes.get(labels.destination_class).copied()
    }

    /// The series of a label set's number.
    pub(super) fn series(&self, number: u32) -> Option<&AccountSeries> {
        self.series.get(usize::try_from(number).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_telemetry::ServerMetrics;

    fn classes(max: usize) -> Classes {
        Classes::new(ServerMetrics::new(&[]).adit().account().clone(), max)
    }

    fn labels<'a>(role: AccountRole, agent: &'a str, destination_class: &'a str) -> Labels<'a> {
        Labels {
            role,
            agent,
            destination_class,
        }
    }

    #[test]
    fn each_label_set_has_its_own_stable_number() {
        let mut classes = classes(10);
        let sets = [
            labels(AccountRole::Target, "a", "bc"),
            labels(AccountRole::Target, "ab", "c"),
            labels(AccountRole::Target, "a", ""),
            labels(AccountRole::Target, "", "a"),
            labels(AccountRole::Client, "a", "bc"),
            labels(AccountRole::Lane, "a", ""),
        ];
        let first = sets.map(|set| classes.number(&set));
        let others = u32::try_from(AccountRole::ALL.len()).unwrap();
        for (at, number) in first.iter().enumerate() {
            assert!(*number >= others, "{:?} is other", sets[at]);
            assert!(!first[..at].contains(number), "{:?}", sets[at]);
            assert!(classes.series(*number).is_some());
        }
        assert_eq!(sets.map(|set| classes.number(&set)), first);
    }

    #[test]
    fn beyond_the_limit_new_label_sets_share_the_class_of_their_role() {
        let mut classes = classes(2);
        let known = [
            labels(AccountRole::Target, "a", "c"),
            labels(AccountRole::Lane, "a", ""),
        ];
        let numbers = known.map(|set| classes.number(&set));
        for role in [AccountRole::Target, AccountRole::Link] {
            // A new label set of a known agent also maps to the class of its role.
            for set in [labels(role, "a", "d"), labels(role, "b", "c")] {
                let number = usize::try_from(classes.number(&set)).unwrap();
                assert_eq!(number, role.index(), "{set:?}");
            }
        }
        assert_eq!(known.map(|set| classes.number(&set)), numbers);
    }
}
