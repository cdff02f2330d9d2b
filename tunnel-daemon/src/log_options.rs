//! Options of the log, from a plan and the environment.

use adit_config::plan::LogPlan;
use adit_telemetry::LogOptions;
use adit_telemetry::log::FILTER_VARIABLE;
use tracing::level_filters::LevelFilter;

use crate::status::text::may_have_colours;

/// Log options that a plan and the environment set.
pub(crate) fn log_options(plan: &LogPlan) -> LogOptions {
    LogOptions {
        format: plan.format,
        level: LevelFilter::from_level(plan.level),
        libraries: plan.libraries.clone(),
        destination: plan.destination.clone(),
        filter: std::env::var(FILTER_VARIABLE)
            .ok()
            .filter(|text| !text.is_empty()),
        colours: may_have_colours(),
    }
}
