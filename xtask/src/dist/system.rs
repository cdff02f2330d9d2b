//! What a static binary holds beside crates: the libraries of Rust, C and the C compiler.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::{Arch, TOOL};
use crate::steps::{first_line, stdout_of};
use crate::workspace::Workspace;

/// A library that is linked.
pub(super) struct Library {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) purl: String,
    pub(super) licence: &'static str,
    /// Files with its licence.
    pub(super) texts: Vec<PathBuf>,
}

/// All of them, on a build machine that is Debian's or a derivative; elsewhere those of C have no version.
///
/// # Errors
/// The toolchain does not say where its files are.
pub(super) fn libraries(workspace: &Workspace, arch: Arch) -> anyhow::Result<Vec<Library>> {
    let c = |file, name, licence| c_library(workspace, arch, file, name, licence);
    Ok(vec![
        rust(workspace)?,
        c("libc.a", "glibc", "LGPL-2.1-or-later")?,
        c(
            "libgcc_eh.a",
            "libgcc",
            "GPL-3.0-or-later WITH GCC-exception-3.1",
        )?,
    ])
}

fn rust(workspace: &Workspace) -> anyhow::Result<Library> {
    let version = stdout_of(workspace.command("rustc").arg("-vV"), TOOL)?;
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("release: "))
        .context("rustc does not tell its release")?
        .to_owned();
    let mut rustc = workspace.command("rustc");
    let sysroot = first_line(rustc.args(["--print", "sysroot"])).context("run rustc")?;
    let doc = Path::new(&sysroot).join("share/doc/rust");
    let texts = [
        "COPYRIGHT-library.html",
        "licenses/Apache-2.0.txt",
        "licenses/MIT.txt",
    ];
    Ok(Library {
        name: "rust-std".to_owned(),
        purl: format!("pkg:generic/rust-std@{version}"),
        version,
        licence: "MIT OR Apache-2.0",
        texts: texts
            .iter()
            .map(|name| doc.join(name))
            .filter(|file| file.is_file())
            .collect(),
    })
}

/// The package that has a library of the C compiler.
fn c_library(
    workspace: &Workspace,
    arch: Arch,
    file: &str,
    name: &str,
    licence: &'static str,
) -> anyhow::Result<Library> {
    let gcc = arch.cross() + "gcc";
    let mut command = workspace.command(&gcc);
    let path = first_line(command.arg(format!("-print-file-name={file}")))
        .with_context(|| format!("run {gcc}"))?;
    let path = fs::canonicalize(&path)
        .with_context(|| format!("{gcc} has no {file}, which a static binary needs"))?;
    let package = first_line(workspace.command("dpkg-query").arg("--search").arg(&path))
        .and_then(|line| Some(line.rsplit_once(": ")?.0.to_owned()));
    let told = package.as_ref().and_then(|package| {
        let mut query = workspace.command("dpkg-query");
        let format = "--showformat=${Version} ${Architecture}";
        let line = first_line(query.args(["--show", format, package]))?;
        let (version, arch) = line.split_once(' ')?;
        Some((version.to_owned(), arch.to_owned()))
    });
    let (Some(package), Some((version, package_arch))) = (package, told) else {
        return Ok(Library {
            name: name.to_owned(),
            version: "unknown".to_owned(),
            purl: format!("pkg:generic/{name}"),
            licence,
            texts: Vec::new(),
        });
    };
    let package = package.split(':').next().unwrap_or_default();
    let text = Path::new("/usr/share/doc").join(package).join("copyright");
    Ok(Library {
        name: name.to_owned(),
        purl: format!(
            "pkg:deb/debian/{package}@{}?arch={package_arch}",
            version.replace('+', "%2B").replace(':', "%3A"),
        ),
        version,
        licence,
        texts: text.is_file().then_some(text).into_iter().collect(),
    })
}
