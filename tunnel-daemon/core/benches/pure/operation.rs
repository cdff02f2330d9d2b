//! What is measured, defined once for both ways to look at it: time, by criterion, and counts, by [`count`](crate::count).

use criterion::{BenchmarkId, Criterion, Throughput};

/// Does the operation once; all that it needs is ready.
type Work = Box<dyn FnMut()>;

/// One thing that is measured. Nothing it works on is made before it runs.
pub(crate) struct Operation {
    group: &'static str,
    function: &'static str,
    parameter: Option<String>,
    bytes: Option<usize>,
    prepare: Box<dyn Fn() -> Work>,
}

impl Operation {
    /// `prepare` makes what the operation works on, and returns what does it once and may be called any number of times.
    pub(crate) fn new<W: FnMut() + 'static>(
        group: &'static str,
        function: &'static str,
        prepare: impl Fn() -> W + 'static,
    ) -> Self {
        Self {
            group,
            function,
            parameter: None,
            bytes: None,
            prepare: Box::new(move || Box::new(prepare())),
        }
    }

    /// The same as one of several that differ by a parameter.
    pub(crate) fn with(mut self, parameter: impl ToString) -> Self {
        self.parameter = Some(parameter.to_string());
        self
    }

    /// Payload that goes through it each time, for a throughput beside the time.
    pub(crate) fn moving(mut self, bytes: usize) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// Its name, which is criterion's as well.
    pub(crate) fn name(&self) -> String {
        let Self {
            group, function, ..
        } = self;
        match &self.parameter {
            Some(parameter) => format!("{group}/{function}/{parameter}"),
            None => format!("{group}/{function}"),
        }
    }

    /// Makes it ready to run.
    pub(crate) fn prepare(&self) -> Work {
        (self.prepare)()
    }

    /// Has criterion take its time.
    pub(crate) fn time(&self, criterion: &mut Criterion) {
        // A group each: within one, the throughput of an operation would also be that of the next.
        let mut group = criterion.benchmark_group(self.group);
        if let Some(bytes) = self.bytes {
            group.throughput(Throughput::Bytes(bytes as u64));
        }
        let id = match &self.parameter {
            Some(parameter) => BenchmarkId::new(self.function, parameter),
            None => BenchmarkId::from_parameter(self.function),
        };
        // Criterion comes back for each sample, and not at all for what its filter leaves out.
        let mut ready = None;
        group.bench_function(id, |bencher| {
            let work = ready.get_or_insert_with(|| self.prepare());
            bencher.iter(work);
        });
        group.finish();
    }
}
