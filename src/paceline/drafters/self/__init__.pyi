from .swift import SwiftDrafter as SwiftDrafter
