//! Accounting without a daemon.

use std::sync::Arc;

use adit_account::{Options, Reader, SocketTable, start};
use adit_net::accounts::Accounts;
use adit_telemetry::{Scrape, ServerMetrics};
use tokio::task::JoinHandle;

use super::wait::until;

/// Accounting with its reader.
pub(crate) struct Accounting {
    pub(crate) accounts: Accounts,
    pub(crate) table: SocketTable,
    metrics: ServerMetrics,
    reader: Option<Reader>,
    task: Option<JoinHandle<()>>,
}

impl Accounting {
    pub(crate) fn start(options: Options) -> Self {
        let mut accounting = Self::paused(options);
        accounting.resume();
        accounting
    }

    /// Starts accounting without a reader of the kernel's events.
    pub(crate) fn paused(options: Options) -> Self {
        let metrics = ServerMetrics::new(&[]);
        let (table, reader) = start(options, metrics.adit().account().clone()).unwrap();
        Self {
            accounts: Accounts::new(Arc::new(table.clone())),
            table,
            metrics,
            reader: Some(reader),
            task: None,
        }
    }

    pub(crate) fn resume(&mut self) {
        self.task = self.reader.take().map(|reader| spawn(reader.run()));
    }

    /// Waits until `connections` connections have ended.
    pub(crate) async fn ended(&self, labels: &str, role: &str, connections: u64) {
        self.until("ends", |now| {
            now.of("connections_total", labels, "", role) == Some(connections)
        })
        .await;
    }

    /// Bytes sent and received.
    pub(crate) fn bytes(&self, labels: &str, role: &str) -> (u64, u64) {
        bytes(&self.metrics.scrape(), labels, role)
    }

    pub(crate) fn sample(&self, series: &str) -> Option<u64> {
        sample(&self.metrics.scrape(), series)
    }

    /// A sample of a series with the labels of connections.
    pub(crate) fn of(&self, name: &str, labels: &str, direction: &str, role: &str) -> Option<u64> {
        of(&self.metrics.scrape(), name, labels, direction, role)
    }

    /// As [`seconds`].
    pub(crate) fn seconds(&self, name: &str, labels: &str, role: &str) -> f64 {
        seconds(&self.metrics.scrape(), name, labels, role)
    }

    /// As [`open_rtt`].
    pub(crate) fn open_rtt(&self, labels: &str, role: &str) -> Option<f64> {
        open_rtt(&self.metrics.scrape(), labels, role)
    }

    pub(crate) async fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        until(what, || done(self), || lines(&self.metrics.scrape())).await;
    }
}

impl Drop for Accounting {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// All lines that accounting exports.
pub(crate) fn lines(scrape: &Scrape) -> String {
    let text = scrape.text();
    let ours = text.lines().filter(|line| line.starts_with("adit_ebpf"));
    ours.collect::<Vec<_>>().join("\n")
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts, far below 2^53"
)]
pub(crate) fn sample(scrape: &Scrape, series: &str) -> Option<u64> {
    number(scrape, series).map(|value| value as u64)
}

fn number(scrape: &Scrape, series: &str) -> Option<f64> {
    let text = scrape.text();
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .find(|(name, _)| *name == series)
        .and_then(|(_, value)| value.parse().ok())
}

/// `name{labels,direction,role,tenant}` as exported. An empty direction means no such label.
pub(crate) fn of(
    scrape: &Scrape,
    name: &str,
    labels: &str,
    direction: &str,
    role: &str,
) -> Option<u64> {
    let direction = match direction {
        "" => String::new(),
        direction => format!(r#",direction="{direction}""#),
    };
    sample(
        scrape,
        &format!(r#"adit_ebpf_{name}{{{labels}{direction},role="{role}",tenant="default"}}"#),
    )
}

/// Sum of a time histogram, `rtt` or `lifetime`, of ended connections.
pub(crate) fn seconds(scrape: &Scrape, name: &str, labels: &str, role: &str) -> f64 {
    let series =
        format!(r#"adit_ebpf_{name}_seconds_sum{{{labels},role="{role}",tenant="default"}}"#);
    number(scrape, &series).unwrap_or_else(|| panic!("no series {series}"))
}

/// Mean round-trip time of open connections, in seconds.
pub(crate) fn open_rtt(scrape: &Scrape, labels: &str, role: &str) -> Option<f64> {
    let series =
        format!(r#"adit_ebpf_open_rtt_seconds{{{labels},role="{role}",tenant="default"}}"#);
    number(scrape, &series)
}

/// Bytes sent and received.
pub(crate) fn bytes(scrape: &Scrape, labels: &str, role: &str) -> (u64, u64) {
    let of = |direction| of(scrape, "bytes_total", labels, direction, role);
    (of("sent").unwrap(), of("received").unwrap())
}

#[expect(clippy::disallowed_methods, reason = "a test has no task limits")]
fn spawn<F: Future<Output = ()> + Send + 'static>(future: F) -> JoinHandle<()> {
    tokio::spawn(future)
}
