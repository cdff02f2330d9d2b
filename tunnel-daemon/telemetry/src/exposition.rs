//! The Prometheus text format as Go's library writes it.
//!
//! The `prometheus` crate prints bucket bounds as `0.000001` where Go prints `1e-06`. `le` is a label, so one dashboard would
//! see two different series.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::metrics_adit::AditMetrics;
use bytes::Bytes;
use prometheus::Registry;
use prometheus::core::{Collector, Desc};
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::{Counter, LabelPair, Metric, MetricFamily, MetricType};

/// Content type of [`Scrape::text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long concurrent answers share a text.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// A source of metrics for scrapes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Scrape {
    registry: Registry,
    /// Values that are brought up to date before they are read.
    adit: Option<AditMetrics>,
    /// The last text of [`Self::answer`], as long as an answer with it is being sent.
    sending: Arc<Mutex<Option<Made>>>,
}

/// A text and its creation time.
type Made = (Instant, Weak<String>);

/// Keeps a text alive for as long as an answer is sent from it.
struct Shared(Arc<String>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Scrape {
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            registry,
            adit: None,
            sending: Arc::default(),
        }
    }

    /// Like [`Self::new`], with values that are brought up to date before each scrape.
    pub(super) fn publishing(registry: Registry, adit: &AditMetrics) -> Self {
        Self {
            adit: Some(adit.clone()),
            ..Self::new(registry)
        }
    }

    /// [`Self::text`] for an HTTP answer. Concurrent answers share a text that is less than a second old: with many series it
    /// has several MB, and scrapers may read slowly. A scrape without concurrent ones has the current values.
    #[must_use]
    pub fn answer(&self) -> Bytes {
        self.answer_at(Instant::now())
    }

    fn answer_at(&self, now: Instant) -> Bytes {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = sending.as_ref().and_then(|(made, text)| {
            let is_young = now.saturating_duration_since(*made) < SHARED_FOR;
            text.upgrade().filter(|_| is_young)
        });
        let text = shared.unwrap_or_else(|| {
            let text = Arc::new(self.text());
            *sending = Some((now, Arc::downgrade(&text)));
            text
        });
        Bytes::from_owner(Shared(text))
    }

    /// The current values, sorted by family name. Reads a few files of /proc, so do not call it on a data thread.
    #[must_use]
    pub fn text(&self) -> String {
        if let Some(adit) = &self.adit {
            adit.publish();
        }
        let families = self.registry.gather();
        let mut text = String::with_capacity(16 * 1024);
        for family in &families {
            // Writing to a String cannot fail.
            let _infallible = write_family(&mut text, family);
        }
        text
    }
}

/// Adds the `process_*` families.
pub(super) fn register_process(registry: &Registry) {
    let process = Process(ProcessCollector::for_self());
    registry
        .register(Box::new(process))
        .expect("process families are declared once");
}

/// The crate's collector, but with CPU time in nanoseconds instead of whole seconds.
struct Process(ProcessCollector);

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.0.collect();
        let cpu = families
            .iter_mut()
            .filter(|family| family.name() == "process_cpu_seconds_total");
        for metric in cpu.flat_map(|family| family.mut_metric().iter_mut()) {
            let mut counter = Counter::default();
            counter.set_value(cpu_time().as_secs_f64());
            metric.set_counter(counter);
        }
        families
    }
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(spent.tv_sec).unwrap_or(0),
        u32::try_from(spent.tv_nsec).unwrap_or(0),
    )
}

fn write_family(text: &mut String, family: &MetricFamily) -> std::fmt::Result {
    let name = family.name();
    writeln!(
        text,
        "# HELP {name} {}",
        family.help().replace('\\', "\\\\").replace('\n', "\\n")
    )?;
    let kind = family.get_field_type();
    let kind_name = match kind {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        MetricType::SUMMARY | MetricType::UNTYPED => "untyped",
    };
    writeln!(text, "# TYPE {name} {kind_name}")?;
    for metric in family.get_metric() {
        match kind {
            MetricType::COUNTER => {
                write_sample(text, name, metric, None, metric.get_counter().get_value())?
            }
            MetricType::GAUGE => {
                write_sample(text, name, metric, None, metric.get_gauge().get_value())?
            }
            MetricType::HISTOGRAM => write_histogram(text, name, metric)?,
            // No family has these types.
            MetricType::SUMMARY | MetricType::UNTYPED => {}
        }
    }
    Ok(())
}

fn write_histogram(text: &mut String, name: &str, metric: &Metric) -> std::fmt::Result {
    let histogram = metric.get_histogram();
    let bucket_name = format!("{name}_bucket");
    let finite = histogram
        .get_bucket()
        .iter()
        .filter(|bucket| bucket.upper_bound().is_finite());
    for bucket in finite {
        let bound = go_float(bucket.upper_bound());
        write_sample(
            text,
            &bucket_name,
            metric,
            Some(&bound),
            count_value(bucket.cumulative_count()),
        )?;
    }
    let count = count_value(histogram.get_sample_count());
    write_sample(text, &bucket_name, metric, Some("+Inf"), count)?;
    write_sample(
        text,
        &format!("{name}_sum"),
        metric,
        None,
        histogram.get_sample_sum(),
    )?;
    write_sample(text, &format!("{name}_count"), metric, None, count)
}

/// The format's numbers are floats; a count beyond 2^53 may lose its last digits.
#[expect(
    clippy::cast_precision_loss,
    reason = "the exposition format has only floats"
)]
fn count_value(count: u64) -> f64 {
    count as f64
}

fn write_sample(
    text: &mut String,
    name: &str,
    metric: &Metric,
    bound: Option<&str>,
    value: f64,
) -> std::fmt::Result {
    text.push_str(name);
    let labels = metric.get_label();
    if !labels.is_empty() || bound.is_some() {
        text.push('{');
        let mut separator = "";
        for label in labels {
            text.push_str(separator);
            write_label(text, label)?;
            separator = ",";
        }
        if let Some(bound) = bound {
            write!(text, "{separator}le=\"{bound}\"")?;
        }
        text.push('}');
    }
    writeln!(text, " {}", go_float(value))
}

fn write_label(text: &mut String, label: &LabelPair) -> std::fmt::Result {
    let value = label
        .value()
        .replace('\\', "\\\\")
        .replace('\n', "\\n")
        .replace('"', "\\\"");
    write!(text, "{}=\"{value}\"", label.name())
}

/// A float as Go's shortest `%g` prints it: with an exponent below 1e-4 and from 1e6 on, of at least two digits.
fn go_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if exponent < -4 => format!("{mantissa}e-{:02}", exponent.unsigned_abs()),
        Ok(exponent) if exponent >= 6 => format!("{mantissa}e+{exponent:02}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts};

    use super::*;

    /// Limit (operations): Listeners for health, metrics and administration
    #[test]
    fn concurrent_scrapes_share_a_text_for_a_second() {
        let registry = Registry::new();
        let counter = prometheus::IntCounter::new("asked", "Help.").unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        let scrape = Scrape::new(registry);
        let start = Instant::now();
        let first = scrape.answer_at(start);
        counter.inc();
        let shared = scrape.clone().answer_at(start + SHARED_FOR / 2);
        assert_eq!(first.as_ptr(), shared.as_ptr());
        let later = scrape.answer_at(start + SHARED_FOR);
        assert_ne!(later, first);
        drop((first, shared, later));
        counter.inc();
        let fresh = scrape.answer_at(start + SHARED_FOR);
        assert_eq!(fresh, scrape.text().as_bytes());
    }

    #[test]
    fn floats_read_as_go_prints_them() {
        let cases = [
            (0.0, "0"),
            (0.000_001, "1e-06"),
            (0.000_01, "1e-05"),
            (0.000_1, "0.0001"),
            (12.5, "12.5"),
            (86_400.0, "86400"),
            (999_999.0, "999999"),
            (1_000_000.0, "1e+06"),
            (1_234_567.0, "1.234567e+06"),
            (-2.0, "-2"),
            (f64::INFINITY, "+Inf"),
            (f64::NAN, "NaN"),
        ];
        for (value, text) in cases {
            assert_eq!(go_float(value), text);
        }
    }

    #[test]
    fn label_values_are_escaped() {
        let registry = Registry::new();
        let family = IntCounterVec::new(Opts::new("c", "a \\ in help"), &["l"]).unwrap();
        registry.register(Box::new(family.clone())).unwrap();
        family.with_label_values(&["a\"b\\c\nd"]).inc();
        let text = Scrape::new(registry).text();
        assert_eq!(
            text,
            "# HELP c a \\\\ in help\n# TYPE c counter\nc{l=\"a\\\"b\\\\c\\nd\"} 1\n"
        );
    }

    #[test]
    fn histogram_lines_follow_the_format() {
        let registry = Registry::new();
        let opts = HistogramOpts::new("h", "help").buckets(vec![0.000_001, 1.0]);
        let family = HistogramVec::new(opts, &["code"]).unwrap();
        registry.register(Box::new(family.clone())).unwrap();
        assert_eq!(
            Scrape::new(registry.clone()).text(),
            "",
            "an unused vector is absent"
        );
        family.with_label_values(&["200"]).observe(0.5);
        family.with_label_values(&["200"]).observe(2.0);
        let expected = "# HELP h help\n# TYPE h histogram\n\
            h_bucket{code=\"200\",le=\"1e-06\"} 0\nh_bucket{code=\"200\",le=\"1\"} 1\n\
            h_bucket{code=\"200\",le=\"+Inf\"} 2\nh_sum{code=\"200\"} 2.5\nh_count{code=\"200\"} 2\n";
        assert_eq!(Scrape::new(registry).text(), expected);
    }
}
