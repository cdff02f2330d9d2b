//! Log set-up: installs the process's one subscriber from the options.
//!
//! Options come from the caller: the binary reads the environment and passes the value of [`FILTER_VARIABLE`].

use std::fs::OpenOptions;
use std::io::{self, IsTerminal as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, OFlags, access};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::writer::MakeWriterExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, reload};

use adit_config::plan::{LogDestination, LogFormat};

use crate::debug::{Apply, DebugLog};
use crate::logfmt::Logfmt;
use crate::sink::{LINES_MAX, Queue, Sink};

/// Environment variable with directives as RUST_LOG has them; it wins over the level.
pub const FILTER_VARIABLE: &str = "ADIT_LOG";

/// Options of [`init`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogOptions {
    /// Text or JSON.
    pub format: LogFormat,
    /// Least severe level written for Adit's modules; libraries are limited to warnings.
    pub level: LevelFilter,
    /// Directives for libraries that should log more, such as `h2=debug`, separated by commas.
    pub libraries: String,
    /// Standard error or a file.
    pub destination: LogDestination,
    /// Directives from [`FILTER_VARIABLE`], if set and not empty.
    pub filter: Option<String>,
    /// Colours on a terminal.
    pub colours: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            format: LogFormat::default(),
            level: LevelFilter::INFO,
            libraries: String::new(),
            destination: LogDestination::default(),
            filter: None,
            colours: true,
        }
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error(
        "{FILTER_VARIABLE}: {input:?} is not a list of filters ({cause}); write for example info,adit_tunnel=debug"
    )]
    BadFilter {
        /// The input.
        input: String,
        /// Why it does not parse.
        cause: tracing_subscriber::filter::ParseError,
    },
    /// The file cannot be opened for appending.
    #[error("log file {}: {cause}; its folder has to exist and be writable", path.display())]
    File {
        /// The log file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The system could not start the writer thread.
    #[error("cannot start the thread that writes logs: {0}")]
    Thread(io::Error),
    /// Other code in this process installed a subscriber first.
    #[error("logging is set up twice in this process")]
    AlreadySet,
}

/// Keeps the log's writer running. Dropping it waits briefly for queued lines. Keep it in `main`, and drop it before
/// `std::process::exit`, which runs no destructors.
#[must_use = "lines may be lost at the end of the process without it"]
pub struct LogGuard {
    queues: Vec<Queue>,
    debug: DebugLog,
}

impl LogGuard {
    /// Changes the level while the process runs.
    #[must_use]
    pub fn debug_log(&self) -> DebugLog {
        self.debug.clone()
    }

    /// Waits until the lines so far are written, as far as their sinks take them: before a last word on standard error.
    pub fn flush(&self) {
        self.queues.iter().for_each(Queue::flush);
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Installs this process's subscriber permanently. A separate thread, which first calls `begin`, writes the lines.
///
/// # Errors
/// [`LogError`] names the input at fault; nothing is installed then.
pub fn init(options: &LogOptions, begin: fn()) -> Result<LogGuard, LogError> {
    let ansi = options.colours
        && options.destination == LogDestination::Stderr
        && io::stderr().is_terminal();
    let start =
        |sink| Queue::start(sink, LINES_MAX, options.format, begin).map_err(LogError::Thread);
    let queue = start(open(&options.destination)?)?;
    let ((subscriber, apply), queues) = match options.destination {
        LogDestination::File {
            also_stderr: Some(least),
            ..
        } => {
            // A separate queue, so that a reader of standard error that stopped reading does not block lines to the file.
            let beside = start(Sink::stderr())?;
            let both = queue.clone().and(beside.clone().with_max_level(least));
            (subscriber(options, both, ansi)?, vec![queue, beside])
        }
        _ => (subscriber(options, queue.clone(), ansi)?, vec![queue]),
    };
    subscriber
        .try_init()
        .map_err(|_already_set| LogError::AlreadySet)?;
    let debug = DebugLog::new(options.clone(), apply);
    Ok(LogGuard { queues, debug })
}

pub(super) fn open(destination: &LogDestination) -> Result<Sink, LogError> {
    match destination {
        LogDestination::Stderr => Ok(Sink::stderr()),
        LogDestination::File {
            path, bytes_max, ..
        } => Sink::file(path, *bytes_max).map_err(|cause| LogError::File {
            path: path.clone(),
            cause,
        }),
    }
}

/// Whether [`init`] would accept these options. Installs nothing, and creates no file.
///
/// # Errors
/// The error that [`init`] would return.
pub fn check(options: &LogOptions) -> Result<(), LogError> {
    filter(options)?;
    let LogDestination::File { path, .. } = &options.destination else {
        return Ok(());
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let opened = OpenOptions::new()
        .append(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path);
    let opened = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from)
        }
        opened => opened.map(drop),
    };
    let path = path.clone();
    opened.map_err(|cause| LogError::File { path, cause })
}

type BoxedSubscriber = Box<dyn tracing::Subscriber + Send + Sync>;

/// The subscriber for `options`, writing to `writer`, which tests set for one thread; and the function that changes its filter.
pub(super) fn subscriber<W>(
    options: &LogOptions,
    writer: W,
    ansi: bool,
) -> Result<(BoxedSubscriber, Apply), LogError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(options)?)
        .with_writer(writer)
        .with_ansi(ansi)
        // Reporting a failed write would use a macro that panics when standard error is closed.
        .log_internal_errors(false);
    Ok(match options.format {
        LogFormat::Text => {
            let builder = builder.event_format(Logfmt).with_filter_reloading();
            let apply = apply_by(builder.reload_handle());
            (Box::new(builder.finish()), apply)
        }
        LogFormat::Json => {
            let builder = builder
                .json()
                .flatten_event(true)
                .with_current_span(false)
                .with_span_list(false)
                .with_filter_reloading();
            let apply = apply_by(builder.reload_handle());
            (Box::new(builder.finish()), apply)
        }
    })
}

fn apply_by<S: 'static>(handle: reload::Handle<EnvFilter, S>) -> Apply {
    Box::new(move |filter| {
        // Fails only when the subscriber is gone.
        let _gone = handle.reload(filter);
    })
}

/// The line that says why a process ends, newline included, in the log's `format`, so that log readers can parse it.
#[must_use]
pub fn fatal(format: LogFormat, why: &str) -> String {
    let why = why.trim();
    match format {
        LogFormat::Text => format!("error: {}\n", why.replace(['\n', '\r'], " ")),
        LogFormat::Json => {
            let mut timestamp = String::new();
            let _infallible = SystemTime.format_time(&mut Writer::new(&mut timestamp));
            let line = serde_json::json!({
                "timestamp": timestamp,
                "level": "ERROR",
                "message": why,
                "target": "adit",
            });
            format!("{line}\n")
        }
    }
}

pub(super) fn filter(options: &LogOptions) -> Result<EnvFilter, LogError> {
    match options
        .filter
        .as_deref()
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        Some(input) => EnvFilter::builder()
            .parse(input)
            .map_err(|cause| LogError::BadFilter {
                input: input.to_owned(),
                cause,
            }),
        None => {
            // h2 and hyper log each frame at debug level, which would drown Adit's own lines.
            let libraries = options.level.min(LevelFilter::WARN);
            let (level, named) = (options.level, &options.libraries);
            let directives = format!("{libraries},adit={level},{named}");
            Ok(EnvFilter::builder().parse_lossy(directives))
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
