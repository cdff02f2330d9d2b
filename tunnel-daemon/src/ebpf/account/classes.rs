//! Labels of connections as the small numbers that the kernel keeps with each, and how many there may be.

use std::collections::HashMap;

use crate::telemetry::labels::{AccountRole, Label as _};
use crate::telemetry::{AccountMetrics, AccountSeries};

/// Agent and destination class of connections for which no more sets of labels are made.
const OTHER: &str = "other";

/// What a connection is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Labels<'a> {
    /// What it is.
    pub role: AccountRole,
    /// Id of the agent at one of its ends; empty if that is not known.
    pub agent: &'a str,
    /// The rule or identifier that its destination matches; empty where there is none.
    pub destination_class: &'a str,
}

/// All sets of labels so far, each with its series. The first few are called other, one for each role.
pub(super) struct Classes {
    numbers: HashMap<(AccountRole, String, String), u32>,
    series: Vec<AccountSeries>,
    /// Without those called other.
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
            numbers: HashMap::new(),
            series,
            max,
            metrics,
        }
    }

    /// The number of a set of labels; that of other, once there are enough.
    pub(super) fn number(&mut self, labels: &Labels<'_>) -> u32 {
        let key = (
            labels.role,
            labels.agent.to_owned(),
            labels.destination_class.to_owned(),
        );
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let other = u32::try_from(labels.role.index()).unwrap_or(0);
        if self.numbers.len() >= self.max {
            return other;
        }
        let Ok(number) = u32::try_from(self.series.len()) else {
            return other;
        };
        self.series.push(
            self.metrics
                .series(labels.role, labels.agent, labels.destination_class),
        );
        self.numbers.insert(key, number);
        self.metrics.series_in_use(self.numbers.len());
        number
    }

    /// The series of a number.
    pub(super) fn series(&self, number: u32) -> Option<&AccountSeries> {
        self.series.get(usize::try_from(number).ok()?)
    }
}
