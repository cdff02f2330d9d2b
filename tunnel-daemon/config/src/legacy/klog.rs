//! The flags of klog, Go's logging library, which manifests pass, and the resulting log plan.

use std::path::{Path, PathBuf};

use tracing::Level;

use super::options::options;
use super::pflag::Flag;
use crate::limits;
use crate::plan::{LogDestination, LogFormat, LogPlan};

const UNUSED: &str = "accepted, without effect here";

options! {
    KlogOptions {
        verbosity: Int("v", "log verbosity: up to 4 info, 5 debug, 6 and more trace") = 4;
        logtostderr: Bool("logtostderr", "log to standard error instead of files") = true;
        alsologtostderr: Bool("alsologtostderr", "log to standard error as well as files");
        stderrthreshold: Severity("stderrthreshold", "lines of this severity or worse also go to standard error when logging to a file") = 2;
        alsologtostderrthreshold: Severity("alsologtostderrthreshold", UNUSED);
        legacy_stderr_threshold_behavior: Bool("legacy-stderr-threshold-behavior", UNUSED) = true;
        skip_headers: Bool("skip-headers", UNUSED);
        skip_log_headers: Bool("skip-log-headers", UNUSED);
        add_dir_header: Bool("add-dir-header", UNUSED);
        one_output: Bool("one-output", UNUSED);
        log_dir: Text("log-dir", "write the log into this directory (no effect with --logtostderr)");
        log_file: Text("log-file", "write the log to this file (no effect with --logtostderr)");
        log_file_max_size_mib: Uint("log-file-max-size", "size in MiB at which the log file is truncated; 0 is unlimited") = limits::LOG_FILE_MIB_MAX;
        vmodule: Text("vmodule", UNUSED);
        log_backtrace_at: Text("log-backtrace-at", UNUSED) = ":0";
    }
}

impl KlogOptions {
    pub(super) fn logging_flags(&mut self) -> Vec<Flag<'_>> {
        self.flags().into_iter().map(Flag::logging).collect()
    }

    /// The log plan; `program` names the file in `--log-dir`.
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
                // klog would write several files into the temporary directory, where they go unnoticed.
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
            // Adit logs no line at level fatal.
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
