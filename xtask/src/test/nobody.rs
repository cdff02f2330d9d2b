//! Runs tests as a user that owns no file and has no capability: tests report what they lack and skip it, and none fails.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workspace::Workspace;

/// Runs a program as that user.
const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
];

/// Permission that other users need to reach files below a folder.
const OTHERS_ENTER: u32 = 0o001;

/// Program and arguments that start a test as the user nobody.
///
/// # Errors
/// Only root can switch to that user, who must be able to reach the checkout.
pub(super) fn prefix(workspace: &Workspace) -> Result<Vec<OsString>, String> {
    let mut prefix: Vec<OsString> = Vec::new();
    if let Some(closed) = closed_folder(workspace.root()) {
        prefix.extend(opened(&closed, workspace.root()));
    }
    prefix.extend(AS_NOBODY.map(OsString::from));
    let (program, arguments) = prefix.split_first().ok_or("no program")?;
    let mut probe = Command::new(program);
    probe.args(arguments).args(["test", "-r"]);
    match probe.arg(workspace.root().join("Cargo.toml")).output() {
        Err(error) => Err(format!("{} cannot be run: {error}", program.display())),
        Ok(output) if output.status.success() => Ok(prefix),
        Ok(output) => Err(format!(
            "only root can become nobody, and nobody has to read the files of the checkout: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// The first folder on the path to the checkout that other users cannot enter.
fn closed_folder(root: &Path) -> Option<PathBuf> {
    let mut folders: Vec<&Path> = root.ancestors().collect();
    folders.reverse();
    let is_closed =
        |folder: &&Path| fs::metadata(folder).is_ok_and(|meta| meta.mode() & OTHERS_ENTER == 0);
    folders.into_iter().find(is_closed).map(Path::to_path_buf)
}

/// Command prefix that opens a closed folder as far as the checkout, in a mount namespace: an empty folder covers the closed
/// one, and the checkout's entries are mounted at their places in it. Outside the namespace nothing changes.
fn opened(closed: &Path, root: &Path) -> Vec<OsString> {
    const SCRIPT: &str = r#"set -e
closed=$1 root=$2; shift 2
kept=$(mktemp -d)
mount --bind "$root" "$kept"
mount -t tmpfs -o mode=755 none "$closed"
for entry in "$kept"/* "$kept"/.[!.]*; do
  [ -e "$entry" ] || continue
  place=$root/${entry##*/}
  if [ -d "$entry" ]; then mkdir -p -m 755 "$place"; else mkdir -p -m 755 "$root"; : > "$place"; fi
  mount --bind "$entry" "$place"
done
umount "$kept"
rmdir "$kept"
cd "$root"
exec "$@""#;
    let words = ["unshare", "--mount", "--propagation=private", "sh", "-c"];
    let mut command: Vec<OsString> = words.map(OsString::from).to_vec();
    command.extend([SCRIPT, "opened"].map(OsString::from));
    command.extend([closed.into(), root.into()]);
    command
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn user_nobody_reads_a_checkout_in_a_private_folder() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("closed/tree");
        fs::create_dir_all(root.join("target")).unwrap();
        fs::write(root.join("Cargo.toml"), "[workspace]").unwrap();
        fs::write(root.join("target/made"), "of it").unwrap();
        for (folder, mode) in [(dir.path(), 0o755), (root.as_path(), 0o700)] {
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(closed_folder(&root).as_deref(), Some(root.as_path()));
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let prefix = prefix(&Workspace::at(&root)).unwrap();
        let read = Command::new(&prefix[0])
            .args(&prefix[1..])
            .args(["sh", "-c", "id -u; cat target/made"])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&read.stdout), "65534\nof it");
        // Outside the mount namespace the mode is unchanged.
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    }
}
