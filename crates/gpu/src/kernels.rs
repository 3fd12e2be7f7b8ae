//! The table of kernels, made from `kernels/*.metal` by the build.

/// What a kernel binds at a buffer index.
#[derive(Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the kernel.
    pub name: &'static str,
    /// Its type.
    pub kind: &'static str,
    /// Whether it is passed as a few bytes (`constant T&`).
    pub by_value: bool,
}

/// One kernel function.
#[derive(Debug)]
pub struct Kernel {
    /// Function name, unique over all files.
    pub name: &'static str,
    /// File under `kernels/`, without `.metal`.
    pub file: &'static str,
    /// Whether its threads wait for each other.
    pub waits: bool,
    /// What it binds, by buffer index.
    pub parameters: &'static [Parameter],
    /// Ids and names of the file's function constants.
    pub constants: &'static [(u32, &'static str)],
    /// The emulator's function.
    #[cfg(emulator)]
    pub(crate) entry: unsafe extern "C" fn(*const *const u8, *const u8),
    /// Threadgroup memory, inline bytes: as the emulator's compiler counts them.
    #[cfg(emulator)]
    pub(crate) sizes: [Size; 2],
}

#[cfg(emulator)]
impl Kernel {
    /// Threadgroup memory that it declares, in bytes; each variable takes a multiple of 16.
    pub fn threadgroup_bytes(&self) -> u32 {
        self.sizes[0].get()
    }

    /// Length of the structs that it is passed inline, in bytes.
    pub fn inline_bytes(&self) -> u32 {
        self.sizes[1].get()
    }
}

/// Address of a constant of the kernels.
#[cfg(emulator)]
#[derive(Debug)]
pub(crate) struct Size(*const u32);

#[cfg(emulator)]
impl Size {
    fn get(&self) -> u32 {
        // SAFETY: a constant of the program.
        unsafe { self.0.read() }
    }
}

// SAFETY: the address of a constant.
#[cfg(emulator)]
unsafe impl Sync for Size {}

/// The texts of a file of kernels.
#[derive(Debug)]
pub struct File {
    /// Its name, without `.metal`.
    pub name: &'static str,
    /// Metal Shading Language.
    pub metal: &'static str,
    /// CUDA C++, to be put behind the header that stands in for Metal's library.
    pub cuda: &'static str,
}

/// Address of a function constant.
#[cfg(emulator)]
pub struct Place(pub(crate) *mut u32);

// SAFETY: an address; what lies there is written under the emulator's lock only.
#[cfg(emulator)]
unsafe impl Sync for Place {}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// The kernel of that name.
///
/// # Panics
/// Where no file has it: a launcher's mistake.
pub fn kernel(name: &str) -> &'static Kernel {
    KERNELS.iter().find(|k| k.name == name).unwrap_or_else(|| panic!("no kernel {name}"))
}

/// The texts of a file.
///
/// # Panics
/// Where there is no such file.
pub fn file(name: &str) -> &'static File {
    FILES.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no file of kernels {name}"))
}
