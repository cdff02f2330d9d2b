//! Options of the log, from a plan and the environment.

use adit_config::plan::{LogDestination, LogFormat, LogPlan};
use adit_telemetry::LogOptions;
use adit_telemetry::log::{self, FILTER_VARIABLE};
use tracing::level_filters::LevelFilter;

/// Log options that a plan and the environment set.
pub(crate) fn log_options(plan: &LogPlan) -> LogOptions {
    LogOptions {
        format: match plan.format {
            LogFormat::Text => log::LogFormat::Text,
            LogFormat::Json => log::LogFormat::Json,
        },
        level: LevelFilter::from_level(plan.level),
        libraries: plan.libraries.clone(),
        destination: match &plan.destination {
            LogDestination::Stderr => log::LogDestination::Stderr,
            LogDestination::File {
                path,
                bytes_max,
                also_stderr,
            } => log::LogDestination::File {
                path: path.clone(),
                bytes_max: bytes_max.unwrap_or(0),
                also_stderr: *also_stderr,
            },
        },
        filter: std::env::var(FILTER_VARIABLE)
            .ok()
            .filter(|text| !text.is_empty()),
    }
}
