//! Debug logging, switched on and off while the process runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::log::{LogError, LogOptions, filter};

/// After this time debug logging ends by itself, so that it cannot fill a disk.
pub const DEBUG_LASTS: Duration = Duration::from_secs(15 * 60);

/// Installs another filter.
pub(super) type Apply = Box<dyn Fn(EnvFilter) + Send + Sync>;

/// The log's level, changeable at run time. Clones share it.
#[derive(Clone)]
pub struct DebugLog(Arc<Switch>);

struct Switch {
    /// The options at process start.
    options: LogOptions,
    apply: Apply,
    /// When debug logging ends, if it is on.
    until: Mutex<Option<Instant>>,
    changed: Notify,
}

/// The current log level.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogView {
    /// A level, or the directives from the environment.
    pub level: String,
    /// Time left until debug logging ends, if it is on.
    pub debug_left: Option<Duration>,
}

impl Default for DebugLog {
    /// For a process whose log is set up elsewhere: changes nothing.
    fn default() -> Self {
        Self::new(LogOptions::default(), Box::new(|_filter| ()))
    }
}

impl DebugLog {
    pub(super) fn new(options: LogOptions, apply: Apply) -> Self {
        Self(Arc::new(Switch {
            options,
            apply,
            until: Mutex::default(),
            changed: Notify::new(),
        }))
    }

    /// The current log level.
    #[must_use]
    pub fn view(&self) -> LogView {
        let left = self
            .until()
            .map(|until| until.saturating_duration_since(Instant::now()));
        let options = &self.0.options;
        LogView {
            level: match (left, &options.filter) {
                (Some(_), None) => options.level.max(LevelFilter::DEBUG).to_string(),
                (Some(_), Some(filter)) => with_debug(filter),
                (None, Some(filter)) => filter.clone(),
                (None, None) => options.level.to_string(),
            },
            debug_left: left,
        }
    }

    /// Toggles debug logging; it lasts for [`DEBUG_LASTS`]. `by` is logged as the cause.
    ///
    /// # Errors
    /// The filter from the environment cannot be extended.
    pub fn toggle(&self, by: &'static str) -> Result<(), LogError> {
        let is_on = self.until().is_some();
        self.set(!is_on, by)
    }

    /// Switches debug logging on for [`DEBUG_LASTS`] from now, or off. A more verbose level from the process start is kept.
    /// `by` is logged as the cause.
    ///
    /// # Errors
    /// The filter from the environment cannot be extended.
    pub fn set(&self, on: bool, by: &'static str) -> Result<(), LogError> {
        let options = &self.0.options;
        let mut until = self.until();
        if on {
            let mut wanted = options.clone();
            match &options.filter {
                Some(text) => wanted.filter = Some(with_debug(text)),
                None => wanted.level = options.level.max(LevelFilter::DEBUG),
            }
            (self.0.apply)(filter(&wanted)?);
            *until = Some(Instant::now() + DEBUG_LASTS);
            let minutes = DEBUG_LASTS.as_secs() / 60;
            tracing::info!(by, minutes, "debug logging is on");
        } else if until.take().is_some() {
            tracing::info!(by, "debug logging is off");
            (self.0.apply)(filter(options)?);
        }
        self.0.changed.notify_one();
        Ok(())
    }

    /// Ends debug logging when its time is over. Never returns.
    pub async fn run(&self) {
        loop {
            let until = *self.until();
            match until {
                None => self.0.changed.notified().await,
                Some(until) => tokio::select! {
                    () = self.0.changed.notified() => (),
                    () = sleep_until(until) => self.expire(),
                },
            }
        }
    }

    fn expire(&self) {
        let is_over = self.until().is_some_and(|until| until <= Instant::now());
        if is_over {
            // The filter from the process start is known to be valid.
            let _never_refused = self.set(false, "its time is over");
        }
    }

    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The later directive wins.
fn with_debug(filter: &str) -> String {
    format!("{},adit=debug", filter.trim())
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep};

    use super::*;
    use crate::log::subscriber;
    use crate::log::tests::Captured;

    /// A log of this thread with these options while the guard is held, and its output.
    fn log(options: LogOptions) -> (DebugLog, Captured, tracing::subscriber::DefaultGuard) {
        let captured = Captured::default();
        let writer = captured.clone();
        let (subscriber, apply) = subscriber(&options, move || writer.clone(), false).unwrap();
        let guard = tracing::subscriber::set_default(subscriber);
        (DebugLog::new(options, apply), captured, guard)
    }

    fn levels(level: LevelFilter, filter: Option<&str>) -> LogOptions {
        LogOptions {
            level,
            filter: filter.map(str::to_owned),
            ..LogOptions::default()
        }
    }

    fn say(number: u8) {
        tracing::debug!(target: "adit::x", "ours{number}");
        tracing::debug!(target: "h2::codec", "frame{number}");
    }

    /// Limit (operations): Debug logging switched on at run time | off again after 15 min
    #[tokio::test(start_paused = true)]
    async fn debug_logging_goes_off_by_itself_after_fifteen_minutes() {
        let (debug, said, _guard) = log(levels(LevelFilter::WARN, None));
        assert_eq!(
            (debug.view().level.as_str(), debug.view().debug_left),
            ("warn", None)
        );
        say(1);
        debug.toggle("SIGUSR1").unwrap();
        say(2);
        assert_eq!(debug.view().level, "debug");
        assert_eq!(debug.view().debug_left, Some(DEBUG_LASTS));
        let running = debug.clone();
        let switching = async move { running.run().await };
        let probing = async {
            sleep(Duration::from_secs(10 * 60)).await;
            debug.set(true, "the admin socket").unwrap();
            sleep(Duration::from_secs(10 * 60)).await;
            say(3);
            sleep(Duration::from_secs(5 * 60 + 1)).await;
            say(4);
        };
        tokio::select! {
            () = switching => (),
            () = probing => (),
        }
        let text = said.text();
        for (part, times) in [
            ("ours1", 0),
            ("ours2", 1),
            ("ours3", 1),
            ("ours4", 0),
            ("frame", 0),
            ("msg=\"debug logging is on\" by=SIGUSR1 minutes=15", 1),
            (
                "msg=\"debug logging is on\" by=\"the admin socket\" minutes=15",
                1,
            ),
            ("msg=\"debug logging is off\" by=\"its time is over\"", 1),
        ] {
            assert_eq!(text.matches(part).count(), times, "{part} in {text}");
        }
        assert_eq!(debug.view().level, "warn");
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_toggle_restores_the_initial_level() {
        let (debug, said, _guard) = log(levels(LevelFilter::INFO, None));
        debug.toggle("SIGUSR1").unwrap();
        advance(Duration::from_secs(60)).await;
        assert_eq!(
            debug.view().debug_left,
            Some(DEBUG_LASTS - Duration::from_secs(60))
        );
        debug.toggle("SIGUSR1").unwrap();
        say(1);
        debug.set(false, "SIGUSR1").unwrap();
        let text = said.text();
        assert!(!text.contains("ours1"), "{text}");
        assert_eq!(text.matches("debug logging is off").count(), 1, "{text}");
    }

    #[test]
    fn trace_level_and_environment_filters_survive_a_toggle() {
        let (debug, said, _guard) = log(levels(LevelFilter::TRACE, None));
        debug.toggle("SIGUSR1").unwrap();
        tracing::trace!(target: "adit::x", "fine");
        assert!(said.text().contains("fine"));
        drop(_guard);
        let (debug, said, _guard) = log(levels(LevelFilter::WARN, Some("h2=debug ")));
        debug.toggle("SIGUSR1").unwrap();
        say(1);
        assert_eq!(debug.view().level, "h2=debug,adit=debug");
        debug.toggle("SIGUSR1").unwrap();
        say(2);
        let text = said.text();
        for (part, times) in [("ours1", 1), ("frame1", 1), ("ours2", 0), ("frame2", 1)] {
            assert_eq!(text.matches(part).count(), times, "{part} in {text}");
        }
    }
}
