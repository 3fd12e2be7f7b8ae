//! The Metal device itself. On a Mac it must open, pass the self-test and import mapped pages; on other systems it
//! must refuse.

use gpu::metal::Metal;

#[cfg(not(target_os = "macos"))]
#[test]
fn refused_where_there_is_no_metal() {
    let Err(error) = Metal::open() else { panic!("no Metal here") };
    assert!(error.refused && error.to_string().contains("macOS 15"), "{error}");
}

/// Opening compiles every file and runs the self-test. A Mac without a usable GPU passes only where nobody asked for one.
#[cfg(target_os = "macos")]
#[test]
fn the_device_opens_and_imports_mapped_pages() {
    use gpu::Device;
    use std::io::Write;

    let metal = match Metal::open() {
        Ok(metal) => metal,
        Err(e) if e.refused && std::env::var_os("HALLMARK_METAL_REQUIRED").is_none() => {
            eprintln!("NOT RUN: {e}");
            return;
        }
        Err(e) => panic!("{e}"),
    };
    gpu::selftest::run(&metal).unwrap();
    println!("{}: {:?}", metal.description(), metal.limits());
    let path = std::env::temp_dir().join(format!("hallmark-import-{}", std::process::id()));
    let data: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::File::create(&path).unwrap().write_all(&data).unwrap();
    // SAFETY: nobody else has this file.
    let map = unsafe { memmap2::Mmap::map(&std::fs::File::open(&path).unwrap()) }.unwrap();
    let part = checkpoint::Bytes::mapped(map).slice(20_000, 300).unwrap();
    let (buffer, offset) = metal.import(&part).unwrap().expect("macOS maps pages of 16 KiB");
    let mut read = [0; 300];
    metal.read(&buffer, offset, &mut read).unwrap();
    assert_eq!(read, data[20_000..20_300]);
    std::fs::remove_file(&path).unwrap();
}
