//! Building blocks of metric sets: a registrar for one-line declarations, series resolved once per label
//! value, and upstream's bucket sets.
//!
//! Scrapers distinguish two kinds of families: a *lazy* family is absent from a scrape until first used, like Go's vectors; an
//! *eager* one shows zeroes from the start.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use crate::guard::{AmountGuard, GaugeGuard};
use crate::labels::Label;

/// Buckets B0 of the compatibility page, in seconds: the defaults of the client library.
pub const BUCKETS_DEFAULT: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// Buckets B1, in seconds: dials and writes, measured at the server.
pub const BUCKETS_SERVER_LATENCY: &[f64] = &[
    0.000_001, 0.000_01, 0.000_1, 0.005, 0.025, 0.1, 0.5, 2.5, 12.5,
];
/// Buckets of Adit's own latencies, in seconds: from 0.1 ms to the deadline of a dial, two or three to a power of ten.
pub const BUCKETS_DIAL: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 25.0,
];
/// Buckets B2, in seconds: tunnel lifetimes, up to a day.
pub const BUCKETS_LIFE: &[f64] = &[
    1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0,
];
/// Buckets B3, in seconds: dials, measured at the agent.
pub const BUCKETS_AGENT_LATENCY: &[f64] = &[0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0];

/// Declares a set of families. The documentation of a field is the help text of its family.
macro_rules! families {
    ($(#[$meta:meta])* $vis:vis struct $set:ident($($registrar:ident),+) { $(
        $(#[doc = $help:literal])+
        $field:ident: $type:ty = $program:ident.$make:ident($name:literal $(, $more:expr)*),
    )+ }) => {
        $(#[$meta])*
        $vis struct $set { $($(#[doc = $help])+ pub $field: $type,)+ }

        impl $set {
            pub(super) fn declare($($registrar: &Registrar<'_>),+) -> Self {
                Self { $($field: $program.$make($name, concat!($($help),+).trim_start() $(, $more)*),)+ }
            }
        }
    };
}
pub(super) use families;

/// Why registering cannot fail: names are literals of this crate, each set has its own registry, and tests build each set.
const SOUND: &str = "family names are valid literals, each declared once per registry";

/// Declares families under one prefix in one registry.
pub struct Registrar<'a> {
    registry: &'a Registry,
    prefix: &'static str,
    is_exported: bool,
}

impl<'a> Registrar<'a> {
    /// Family names will be `prefix` + name.
    #[must_use]
    pub fn new(registry: &'a Registry, prefix: &'static str) -> Self {
        Self {
            registry,
            prefix,
            is_exported: true,
        }
    }

    /// A registrar whose families are left out of scrapes unless `is_exported`: those of the other program.
    #[must_use]
    pub fn exported_if(&self, is_exported: bool) -> Self {
        Self {
            is_exported,
            ..*self
        }
    }

    /// A counter without labels, 0 from the start.
    #[must_use]
    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.keep(IntCounter::with_opts(self.opts(name, help)))
    }

    /// A gauge without labels, 0 from the start.
    #[must_use]
    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        Gauge(self.keep(IntGauge::with_opts(self.opts(name, help))))
    }

    /// A counter vector with free labels, absent until used. The caller must bound the number of label values.
    #[must_use]
    pub fn counter_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.keep(IntCounterVec::new(self.opts(name, help), labels))
    }

    /// A gauge vector with free labels, absent until used. The caller must bound the number of label values.
    #[must_use]
    pub fn gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.keep(IntGaugeVec::new(self.opts(name, help), labels))
    }

    /// A gauge vector of fractions with free labels, absent until used. The caller must bound the number of label values.
    #[must_use]
    pub fn float_gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.keep(GaugeVec::new(self.opts(name, help), labels))
    }

    /// A histogram vector, absent until used; `buckets` are upper bounds in seconds.
    #[must_use]
    pub fn histogram_vec(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> HistogramVec {
        let opts = HistogramOpts::new(self.full_name(name), help).buckets(buckets.to_vec());
        self.keep(HistogramVec::new(opts, labels))
    }

    /// A histogram without labels, 0 from the start; `buckets` are upper bounds in seconds.
    #[must_use]
    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(self.full_name(name), help).buckets(buckets.to_vec());
        self.keep(Histogram::with_opts(opts))
    }

    /// A counter per value of `L`, each absent until used.
    #[must_use]
    pub fn counters<L: Label>(&self, name: &str, help: &str, label: &str) -> Counters<L> {
        #[cfg(test)]
        crate::tests::declared::values::<L>(&self.full_name(name));
        Counters::new(self.counter_vec(name, help, &[label]))
    }

    /// A counter per value of `L`, all 0 from the start, which alerts on increases need.
    #[must_use]
    pub fn counters_from_zero<L: Label>(&self, name: &str, help: &str, label: &str) -> Counters<L> {
        let counters = self.counters(name, help, label);
        L::ALL.iter().for_each(|value| _ = counters.of(*value));
        counters
    }

    /// A gauge per value of `L`, each absent until used.
    #[must_use]
    pub fn gauges<L: Label>(&self, name: &str, help: &str, label: &str) -> Gauges<L> {
        #[cfg(test)]
        crate::tests::declared::values::<L>(&self.full_name(name));
        Gauges::new(self.gauge_vec(name, help, &[label]))
    }

    /// A gauge per value of `L`, all 0 from the start.
    #[must_use]
    pub fn gauges_from_zero<L: Label>(&self, name: &str, help: &str, label: &str) -> Gauges<L> {
        let gauges = self.gauges(name, help, label);
        L::ALL.iter().for_each(|value| _ = gauges.of(*value));
        gauges
    }

    /// A gauge without labels that is absent until used, as a Go vector with no labels is.
    #[must_use]
    pub fn lazy_gauge(&self, name: &str, help: &str) -> LazyGauge {
        LazyGauge {
            vec: self.gauge_vec(name, help, &[]),
            series: OnceLock::new(),
        }
    }

    /// A histogram without labels that is absent until used.
    #[must_use]
    pub fn lazy_histogram(&self, name: &str, help: &str, buckets: &[f64]) -> LazyHistogram {
        LazyHistogram::new(self.histogram_vec(name, help, buckets, &[]))
    }

    fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(self.full_name(name), help)
    }

    fn keep<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let family = made.expect(SOUND);
        #[cfg(test)]
        self.is_exported
            .then(|| crate::tests::declared::family(&family));
        if self.is_exported {
            self.registry
                .register(Box::new(family.clone()))
                .expect(SOUND);
        }
        family
    }
}

/// One series per label value, from the family `V`; each is resolved at its first use.
pub struct Series<L, V, S> {
    vec: V,
    series: Box<[OnceLock<S>]>,
    label: std::marker::PhantomData<L>,
}

/// One counter per label value; after its first use each costs one atomic add.
pub type Counters<L> = Series<L, IntCounterVec, IntCounter>;
/// One gauge per label value.
pub type Gauges<L> = Series<L, IntGaugeVec, Gauge>;

impl<L: Label, V, S> Series<L, V, S> {
    fn new(vec: V) -> Self {
        Self {
            vec,
            series: L::ALL.iter().map(|_| OnceLock::new()).collect(),
            label: std::marker::PhantomData,
        }
    }
}

impl<L: Label> Counters<L> {
    /// Counts one more of `value`.
    pub fn count(&self, value: impl Into<L>) {
        self.of(value.into()).inc();
    }

    /// The counter of `value`.
    pub fn of(&self, value: L) -> &IntCounter {
        self.series[value.index()].get_or_init(|| self.vec.with_label_values(&[value.as_str()]))
    }
}

/// A gauge of a number of things, or of bytes.
#[derive(Clone, Debug)]
pub struct Gauge(pub(super) IntGauge);

impl Gauge {
    /// One more until the guard is dropped.
    pub fn guard(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0)
    }

    /// A share of this gauge, subtracted when dropped; 0 at first.
    pub fn share(&self) -> AmountGuard {
        AmountGuard::new(&self.0)
    }

    /// Sets the number.
    pub fn set<N>(&self, number: N)
    where
        i64: TryFrom<N>,
    {
        self.0.set(i64::try_from(number).unwrap_or(i64::MAX));
    }

    /// The number.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.get()
    }
}

impl<L: Label> Gauges<L> {
    /// The gauge of `value`.
    pub fn of(&self, value: L) -> &Gauge {
        let made = || Gauge(self.vec.with_label_values(&[value.as_str()]));
        self.series[value.index()].get_or_init(made)
    }
}

/// A gauge without labels that appears in a scrape once it was used.
pub struct LazyGauge {
    vec: IntGaugeVec,
    series: OnceLock<Gauge>,
}

impl LazyGauge {
    /// The gauge; the first call makes it visible.
    pub fn used(&self) -> &Gauge {
        self.series
            .get_or_init(|| Gauge(self.vec.with_label_values(NO_LABELS)))
    }
}

/// A histogram without labels that appears in a scrape once it has a value. Cheap to clone.
#[derive(Clone)]
pub struct LazyHistogram(Arc<LazyHistogramInner>);

struct LazyHistogramInner {
    vec: HistogramVec,
    series: OnceLock<Histogram>,
}

impl LazyHistogram {
    fn new(vec: HistogramVec) -> Self {
        Self(Arc::new(LazyHistogramInner {
            vec,
            series: OnceLock::new(),
        }))
    }

    /// Records one duration; the first makes the histogram visible.
    pub fn observe(&self, elapsed: Duration) {
        self.0
            .series
            .get_or_init(|| self.0.vec.with_label_values(NO_LABELS))
            .observe(elapsed.as_secs_f64());
    }
}

impl std::fmt::Debug for LazyHistogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LazyHistogram")
    }
}

const NO_LABELS: &[&str] = &[];
