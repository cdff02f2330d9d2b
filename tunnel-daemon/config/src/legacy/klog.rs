//! The flags of Go's logging library, which manifests pass (compat 10), and the log plan they mean.

use std::path::{Path, PathBuf};

use tracing::Level;

use super::pflag::{Flag, Slot};
use crate::limits;
use crate::plan::{LogDestination, LogFormat, LogPlan};

/// As typed.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct KlogOptions {
    pub(super) verbosity: i64,
    pub(super) logtostderr: bool,
    pub(super) alsologtostderr: bool,
    pub(super) stderrthreshold: i64,
    pub(super) alsologtostderrthreshold: i64,
    pub(super) legacy_stderr_threshold_behavior: bool,
    pub(super) skip_headers: bool,
    pub(super) skip_log_headers: bool,
    pub(super) add_dir_header: bool,
    pub(super) one_output: bool,
    pub(super) log_dir: String,
    pub(super) log_file: String,
    pub(super) log_file_max_size_mib: u64,
    pub(super) vmodule: String,
    pub(super) log_backtrace_at: String,
}

impl Default for KlogOptions {
    fn default() -> Self {
        Self {
            verbosity: 4,
            logtostderr: true,
            alsologtostderr: false,
            stderrthreshold: 2,
            alsologtostderrthreshold: 0,
            legacy_stderr_threshold_behavior: true,
            skip_headers: false,
            skip_log_headers: false,
            add_dir_header: false,
            one_output: false,
            log_dir: String::new(),
            log_file: String::new(),
            log_file_max_size_mib: limits::LOG_FILE_MIB_MAX,
            vmodule: String::new(),
            log_backtrace_at: ":0".to_owned(),
        }
    }
}

impl KlogOptions {
    /// Every flag, bound to its field. A table: one row a flag, whatever its width.
    #[rustfmt::skip]
    pub(super) fn flags(&mut self) -> Vec<Flag<'_>> {
        const UNUSED: &str = "accepted, without effect here";
        let flags = [
            Flag::new("v", Slot::Int(&mut self.verbosity), "log verbosity: up to 4 info, 5 debug, 6 and more trace"),
            Flag::new("logtostderr", Slot::Bool(&mut self.logtostderr), "log to standard error instead of files"),
            Flag::new("alsologtostderr", Slot::Bool(&mut self.alsologtostderr), "log to standard error as well as files"),
            Flag::new("stderrthreshold", Slot::Severity(&mut self.stderrthreshold), "lines of this severity or worse also go to standard error when logging to a file"),
            Flag::new("alsologtostderrthreshold", Slot::Severity(&mut self.alsologtostderrthreshold), UNUSED),
            Flag::new("legacy-stderr-threshold-behavior", Slot::Bool(&mut self.legacy_stderr_threshold_behavior), UNUSED),
            Flag::new("skip-headers", Slot::Bool(&mut self.skip_headers), UNUSED),
            Flag::new("skip-log-headers", Slot::Bool(&mut self.skip_log_headers), UNUSED),
            Flag::new("add-dir-header", Slot::Bool(&mut self.add_dir_header), UNUSED),
            Flag::new("one-output", Slot::Bool(&mut self.one_output), UNUSED),
            Flag::new("log-dir", Slot::Text(&mut self.log_dir), "write the log into this directory (no effect with --logtostderr)"),
            Flag::new("log-file", Slot::Text(&mut self.log_file), "write the log to this file (no effect with --logtostderr)"),
            Flag::new("log-file-max-size", Slot::Uint(&mut self.log_file_max_size_mib), "size in MiB at which the log file is truncated; 0 is unlimited"),
            Flag::new("vmodule", Slot::Text(&mut self.vmodule), UNUSED),
            Flag::new("log-backtrace-at", Slot::Text(&mut self.log_backtrace_at), UNUSED),
        ];
        flags.into_iter().map(Flag::logging).collect()
    }

    /// The plan; `program` names the file in `--log-dir`.
    pub(super) fn plan(&self, program: &str, warnings: &mut Vec<String>) -> LogPlan {
        if !self.vmodule.is_empty() {
            warnings.push("--vmodule is accepted without effect: use --v".to_owned());
        }
        let level = match self.verbosity {
            ..=4 => Level::INFO,
            5 => Level::DEBUG,
            _ => Level::TRACE,
        };
        LogPlan {
            format: LogFormat::Text,
            level,
            libraries: String::new(),
            destination: self.destination(program, warnings),
        }
    }

    fn destination(&self, program: &str, warnings: &mut Vec<String>) -> LogDestination {
        let path = match (
            self.logtostderr,
            self.log_file.as_str(),
            self.log_dir.as_str(),
        ) {
            (true, ..) => return LogDestination::Stderr,
            (false, "", "") => {
                // klog would write several files into the temporary directory, which nobody finds.
                warnings.push("--logtostderr=false without --log-file or --log-dir: logging to standard error".to_owned());
                return LogDestination::Stderr;
            }
            (false, "", dir) => Path::new(dir).join(format!("{program}.log")),
            (false, file, _) => PathBuf::from(file),
        };
        let also_stderr = match (self.alsologtostderr, self.stderrthreshold) {
            (true, _) | (false, ..=0) => Some(Level::TRACE),
            (false, 1) => Some(Level::WARN),
            (false, 2) => Some(Level::ERROR),
            // No line of ours is fatal.
            (false, 3..) => None,
        };
        let bytes_max = match self.log_file_max_size_mib {
            0 => None,
            mib => Some(mib.saturating_mul(limits::MIB)),
        };
        LogDestination::File {
            path,
            bytes_max,
            also_stderr,
        }
    }
}
