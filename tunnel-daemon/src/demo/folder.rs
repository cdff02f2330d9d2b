//! The folder of one run, removed with its contents at the end.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::{Context as _, ensure};

/// Longest name that a unix socket can have, without the final zero.
const SOCKET_NAME_BYTES_MAX: usize = 107;
/// The folder holds keys and sockets that this user's group could use otherwise.
const FOLDER_MODE: u32 = 0o700;

/// A folder only this user can enter.
pub(super) struct Folder {
    path: String,
    /// The demo created the folder; else only the demo's files are removed.
    made: bool,
}

impl Folder {
    /// A new temporary folder, or `dir`, which must be empty or not there yet.
    ///
    /// # Errors
    /// The folder cannot be created, is not empty, or its path is too long for sockets.
    pub(super) fn make(dir: Option<&Path>) -> anyhow::Result<Self> {
        let Some(dir) = dir else {
            let temporary = tempfile::Builder::new()
                .prefix("adit-demo-")
                .permissions(fs::Permissions::from_mode(FOLDER_MODE))
                .tempdir()
                .with_context(|| format!("no folder in {}", std::env::temp_dir().display()))?;
            return Self::at(&temporary.keep(), true);
        };
        let given = || {
            let made = match fs::DirBuilder::new().mode(FOLDER_MODE).create(dir) {
                Ok(()) => true,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => false,
                Err(error) => return Err(error.into()),
            };
            ensure!(
                made || fs::read_dir(dir)?.next().is_none(),
                "not empty: give a new or empty folder, whatever is in it goes away at the end"
            );
            // The printed commands must work from any working directory.
            Self::at(&fs::canonicalize(dir)?, made)
        };
        given().with_context(|| format!("--dir {}", dir.display()))
    }

    fn at(path: &Path, made: bool) -> anyhow::Result<Self> {
        let text = path.to_str().context("its name is not UTF-8")?;
        let folder = Self {
            path: text.to_owned(),
            made,
        };
        let longest = folder.file("http-connect.sock");
        ensure!(
            longest.len() <= SOCKET_NAME_BYTES_MAX,
            "{longest} has {} bytes, a unix socket at most {SOCKET_NAME_BYTES_MAX}: give a shorter --dir",
            longest.len()
        );
        Ok(folder)
    }

    /// The folder's path.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// The path of `name` in the folder.
    pub(super) fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.path)
    }

    /// Writes a file that only this user can read.
    ///
    /// # Errors
    /// The system's error, with the path.
    pub(super) fn write(&self, name: &str, text: &str) -> anyhow::Result<String> {
        let path = self.file(name);
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {path}"))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The folder was empty at the start. Subfolders are not the demo's and stay, as do files that cannot be removed.
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries {
            let _left = fs::remove_file(entry.path());
        }
        if self.made {
            let _left = fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_folder_is_emptied_and_removed_only_if_created_here() {
        let outer = tempfile::tempdir().unwrap();
        let new = outer.path().join("new");
        let folder = Folder::make(Some(&new)).unwrap();
        folder.write("file", "text").unwrap();
        drop(folder);
        assert!(!new.exists());
        let folder = Folder::make(Some(outer.path())).unwrap();
        folder.write("file", "text").unwrap();
        drop(folder);
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 0);
    }

    #[test]
    fn created_folders_are_private_to_the_user() {
        let outer = tempfile::tempdir().unwrap();
        for given in [None, Some(outer.path().join("new"))] {
            let folder = Folder::make(given.as_deref()).unwrap();
            let mode = fs::metadata(&folder.path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, FOLDER_MODE, "{given:?}");
        }
    }

    #[test]
    fn nonempty_folder_is_refused_and_unchanged() {
        let outer = tempfile::tempdir().unwrap();
        fs::write(outer.path().join("precious"), "text").unwrap();
        let error = Folder::make(Some(outer.path())).err().unwrap();
        assert!(format!("{error:#}").contains("not empty"), "{error:#}");
        assert!(outer.path().join("precious").exists());
    }

    #[test]
    fn overlong_socket_name_error_names_the_remedy() {
        let outer = tempfile::tempdir().unwrap();
        let long = outer.path().join("x".repeat(90));
        let error = Folder::make(Some(&long)).err().unwrap();
        assert!(format!("{error:#}").contains("shorter --dir"), "{error:#}");
        assert!(!long.exists());
    }
}
