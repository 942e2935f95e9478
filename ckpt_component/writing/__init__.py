"""Write byte ranges to files, in this process or in a writer process. Imports no torch."""
