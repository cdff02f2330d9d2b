//! What machines said in a run for the page, in files: one that was cut off goes on where it ended.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::console::Console;
use super::machine::Accel;
use super::table::Made;

/// Files of one commit and object.
pub(super) struct Said {
    folder: PathBuf,
    /// The first words of a file.
    made: String,
    /// A tree with changes is never the same again.
    is_of_a_commit: bool,
}

impl Said {
    /// Those below `folder` that were `made` so.
    pub(super) fn new(folder: &Path, made: &Made) -> Self {
        let Made { commit, object } = made;
        Self {
            folder: folder.join("said"),
            made: format!("{commit}, object {object}"),
            is_of_a_commit: !commit.contains(' ') && commit != "unknown",
        }
    }

    /// What the kernel of this release said before, all of which had passed, and what executed it.
    pub(super) fn earlier(&self, release: &str) -> Option<(Accel, Console)> {
        let text = fs::read_to_string(self.folder.join(release)).ok()?;
        let (head, lines) = text.split_once('\n')?;
        let accel = Accel::ALL
            .into_iter()
            .find(|accel| self.is_of_a_commit && self.head(*accel) == head)?;
        let mut console = Console::default();
        for line in lines.lines() {
            console.handle_line(line);
        }
        console.is_complete().then_some((accel, console))
    }

    /// Keeps answers all of which have passed.
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

    fn made(commit: &str) -> Made {
        Made {
            commit: commit.to_owned(),
            object: "0badc0de".to_owned(),
        }
    }

    fn console(lines: &[&str]) -> Console {
        let mut console = Console::default();
        for line in lines {
            console.handle_line(line);
        }
        console
    }

    const PASSED: [&str; 5] = [
        "@@hello 6.1.0 #1",
        "@@begin a",
        "| yes",
        "@@end a 0 1.0 2.5",
        "@@bye",
    ];

    #[test]
    fn what_was_kept_is_had_again_for_the_same_commit_object_and_kernel_alone() {
        let folder = tempfile::tempdir().unwrap();
        let said = Said::new(folder.path(), &made("abc1234"));
        assert!(said.earlier("6.1.0-1").is_none());
        said.keep("6.1.0-1", Accel::Tcg, &console(&PASSED)).unwrap();

        let (accel, again) = said.earlier("6.1.0-1").unwrap();
        assert_eq!((accel, again.hello()), (Accel::Tcg, "6.1.0 #1"));
        let ran = again.ran("a").unwrap();
        assert_eq!((ran.status, ran.seconds), (Some(0), 1.5));
        assert_eq!(ran.lines, ["yes"]);

        assert!(said.earlier("6.1.0-2").is_none());
        let other = Said::new(folder.path(), &made("def5678"));
        assert!(other.earlier("6.1.0-1").is_none());
        let mut newer = made("abc1234");
        newer.object = "c0ffee".to_owned();
        let newer = Said::new(folder.path(), &newer);
        assert!(newer.earlier("6.1.0-1").is_none());
    }

    #[test]
    fn a_changed_tree_and_a_file_without_its_end_are_run_again() {
        let folder = tempfile::tempdir().unwrap();
        for commit in ["abc1234 with changes", "unknown"] {
            let said = Said::new(folder.path(), &made(commit));
            said.keep("6.1.0-1", Accel::Tcg, &console(&PASSED)).unwrap();
            assert!(said.earlier("6.1.0-1").is_none(), "{commit}");
        }
        let said = Said::new(folder.path(), &made("abc1234"));
        let cut = &PASSED[..PASSED.len() - 1];
        said.keep("6.1.0-1", Accel::Tcg, &console(cut)).unwrap();
        assert!(said.earlier("6.1.0-1").is_none());
    }
}
