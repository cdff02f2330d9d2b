//! Console logs of kernels that passed in a run for the page, kept as files, so that an interrupted run can resume.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::console::Console;
use super::machine::Accel;
use super::table::Made;

/// Logs that belong to one commit and eBPF object.
pub(super) struct ConsoleLogs {
    folder: PathBuf,
    /// First words of a log file: commit and object.
    made: String,
    /// Whether the tree has no changes: a log of a changed tree is never reused.
    is_of_a_commit: bool,
}

impl ConsoleLogs {
    /// The logs below `folder` that belong to `made`.
    pub(super) fn new(folder: &Path, made: &Made) -> Self {
        let Made { commit, object } = made;
        Self {
            folder: folder.join("said"),
            made: format!("{commit}, object {object}"),
            is_of_a_commit: !commit.contains(' ') && commit != "unknown",
        }
    }

    /// Accelerator and console log of this kernel release from an earlier run that passed completely.
    pub(super) fn earlier(&self, release: &str) -> Option<(Accel, Console)> {
        let text = fs::read_to_string(self.folder.join(release)).ok()?;
        let (head, lines) = text.split_once('\n')?;
        let mut accels = [Accel::Kvm, Accel::Tcg].into_iter();
        let accel = accels.find(|accel| self.is_of_a_commit && self.head(*accel) == head)?;
        let console = Console::of(lines.lines());
        console.is_complete().then_some((accel, console))
    }

    /// Keeps the log of a kernel that passed completely.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn keep(
        &self,
        release: &str,
        accel: Accel,
        console: &Console,
    ) -> anyhow::Result<()> {
        let path = self.folder.join(release);
        let lines = console.lines().join("\n");
        fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&path, format!("{}\n{lines}\n", self.head(accel))))
            .with_context(|| format!("write {}", path.display()))
    }

    fn head(&self, accel: Accel) -> String {
        format!("{}, {}", self.made, accel.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_reused_only_for_the_same_commit_object_and_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let logs = |commit: &str, object: &str| {
            let made = Made {
                commit: commit.to_owned(),
                object: object.to_owned(),
            };
            ConsoleLogs::new(folder.path(), &made)
        };
        let lines = [
            "@@hello 6.1.0 #1",
            "@@begin a",
            "@@end a 0 1.0 2.5",
            "@@bye",
        ];
        let (here, console) = (logs("abc1234", "0bad"), Console::of(lines));
        here.keep("6.1.0-1", Accel::Tcg, &console).unwrap();
        let (accel, again) = here.earlier("6.1.0-1").unwrap();
        assert_eq!((accel, again.hello()), (Accel::Tcg, "6.1.0 #1"));
        assert!(here.earlier("6.1.0-2").is_none());
        assert!(logs("def5678", "0bad").earlier("6.1.0-1").is_none());
        assert!(logs("abc1234", "c0ff").earlier("6.1.0-1").is_none());
        // A changed tree, and a log without its end.
        let changed = logs("abc1234 with changes", "0bad");
        changed.keep("6.1.0-1", Accel::Tcg, &console).unwrap();
        assert!(changed.earlier("6.1.0-1").is_none());
        let cut = Console::of(lines.into_iter().take(3));
        here.keep("6.1.0-1", Accel::Tcg, &cut).unwrap();
        assert!(here.earlier("6.1.0-1").is_none());
    }
}
